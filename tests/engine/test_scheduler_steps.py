"""The scheduler by itself, without an engine: it is stepped with made-up outputs."""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from typing import Any

import pytest

from endoscope.vllm import internals
from endoscope.vllm.engine.scheduler import PATIENCE, AsyncScheduler, Scheduler, make_scheduler
from tests.conftest import path_of

BLOCK = 16
TOKEN, END = 7, 2


class Steps:
    """A scheduler, and an engine's loop around it whose model makes the same token for ever.

    Args:
        asynchronous: whether a step is scheduled before the output of the one before is there.
        budget: tokens of a step.
        blocks: blocks of keys and values, of 16 tokens.
        plain: vLLM's own scheduler in place of ours.
    """

    def __init__(
        self, asynchronous: bool = False, budget: int = 64, blocks: int = 1000, plain: bool = False, **options: Any
    ) -> None:
        import torch
        from vllm import EngineArgs
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        arguments = {"max_num_seqs": 16, "max_model_len": 512, "enable_prefix_caching": False, **options}
        model = path_of("tiny-llama")
        config = EngineArgs(model=model, max_num_batched_tokens=budget, **arguments).create_engine_config()
        config.scheduler_config.async_scheduling = asynchronous
        config.cache_config.num_gpu_blocks = blocks
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
        kept = KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        kind = config.scheduler_config.get_scheduler_cls() if plain else make_scheduler
        self.scheduler: Any = kind(config, kept, StructuredOutputManager(config), block_size=BLOCK, log_stats=True)
        self.depth = 2 if asynchronous else 1
        self.flying: deque[tuple[Any, Any]] = deque()
        self.numbers = itertools.count()
        self.steps = 0
        self.first: dict[str, int] = {}
        """The step in which a request was scheduled first."""
        self.shown: dict[str, list[int]] = {}
        """How many of a request's tokens each of its steps ran."""
        self.made: dict[str, int] = {}
        """How many tokens the model has made for a request, those that the scheduler has not seen yet among them."""
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, Any] = {}
        self.says: dict[tuple[str, int], int] = {}
        """Other tokens than the usual one, by request and number."""
        self.ends: dict[tuple[str, int], bool] = {}
        """Requests whose blocks end them, by request and step of its own; whether that step's token counts."""
        self.quiet: dict[tuple[str, int], bool] = {}
        """Requests whose blocks end, and which go on, in the same way."""

    def add(self, tokens: int, traced: bool = False, make: int = 1000, priority: int = 0, stops: bool = False) -> str:
        """A request arrives.

        Args:
            tokens: of its prompt, which shares nothing with any other's.
            traced: whether it carries a block.
            make: how many tokens it generates.
            priority: vLLM's.
            stops: whether a token may end it.
        """
        from vllm import SamplingParams
        from vllm.v1.request import Request

        number = next(self.numbers)
        params = SamplingParams(max_tokens=make, temperature=0.0, stop_token_ids=[END] if stops else None)
        if traced:
            internals.put_submission(params, b"a block")
        name = f"{'traced' if traced else 'plain'}-{number}"
        request = Request(name, [number + 3] * tokens, params, None, arrival_time=float(number), priority=priority)
        self.scheduler.add_request(request)
        self.tokens[name], self.shown[name], self.made[name] = [], [], 0
        return name

    def step(self) -> dict[str, int]:
        """One turn of the engine's loop; returns how many tokens of each request were scheduled in it."""
        output = self.scheduler.schedule()
        for name, count in output.num_scheduled_tokens.items():
            self.first.setdefault(name, self.steps)
            self.shown[name].append(count)
        self.steps += 1
        assert output.total_num_scheduled_tokens <= self.scheduler.max_num_scheduled_tokens
        assert len(self.scheduler.running) <= self.scheduler.max_num_running_reqs
        self.flying.append((output, self._run(output)))
        if len(self.flying) == self.depth:
            self._update()
        return dict(output.num_scheduled_tokens)

    def drain(self) -> None:
        """Run until every request is over."""
        for _ in range(5000):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        while self.flying:
            self._update()
        assert not self.scheduler.requests, f"after {self.steps} steps, these are not over"

    def _run(self, output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        sampled = []
        over: dict[str, bool] = {}
        quiet = []
        for name in names:
            request = self.scheduler.requests[name]
            made, step = self.made[name], len(self.shown[name]) - 1
            whole = request.num_computed_tokens >= request.num_prompt_tokens + made
            sampled.append([self.says.get((name, made), TOKEN)] if whole else [])
            self.made[name] += len(sampled[-1])
            if (name, step) in self.ends:
                over[name] = self.ends[name, step]
            if (name, step) in self.quiet:
                quiet.append(name)
        result = ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)
        if over or quiet:
            internals.mark(result, over, quiet, "eager")
        # It comes from another process.
        return pickle.loads(pickle.dumps(result))

    def _update(self) -> None:
        output, result = self.flying.popleft()
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                self.tokens[each.request_id] += each.new_token_ids
                if each.finish_reason is not None:
                    assert each.request_id not in self.finished, "it finishes twice"
                    self.finished[each.request_id] = each.finish_reason


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    """Both ways to schedule."""
    return bool(request.param)


def test_the_scheduler_follows_the_configuration() -> None:
    # contract: F1
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Theirs

    ahead, behind = Steps(asynchronous=True).scheduler, Steps().scheduler
    assert type(ahead) is AsyncScheduler
    assert isinstance(ahead, Theirs)
    assert type(behind) is Scheduler
    assert not isinstance(behind, Theirs)


def test_a_traced_prompt_does_not_starve(asynchronous: bool) -> None:
    # contract: F2
    engine = Steps(asynchronous, budget=64)
    for _ in range(8):
        engine.add(5, make=400)
    for _ in range(20):
        engine.add(50, make=3)
        engine.step()
    begun = set(engine.first)
    traced = engine.add(63, traced=True, make=3)
    start = engine.steps
    while traced not in engine.first:
        # Untraced requests never stop to come: one prefill and one that decodes for long, at every step.
        engine.add(50, make=3)
        engine.add(5, make=400)
        engine.step()
        assert engine.steps - start < 100, "it starves"
    assert engine.shown[traced][0] == 63
    # Those before it in the queue come first, and then it waits no longer than is said.
    last = max(engine.first[name] for name in engine.first if int(name.split("-")[1]) < int(traced.split("-")[1]))
    assert engine.first[traced] <= max(last, start) + PATIENCE + 1
    assert len(begun) > 5
    engine.drain()
    assert engine.tokens[traced] == [TOKEN] * 3
    assert all(len(tokens) in (3, 400) for tokens in engine.tokens.values())


def test_without_our_scheduler_it_would_be_split() -> None:
    engine = Steps(budget=64, plain=True)
    for _ in range(8):
        engine.add(5, make=400)
    engine.step()
    traced = engine.add(63, traced=True, make=3)
    engine.drain()
    assert engine.shown[traced][0] < 63


def test_several_traced_prompts_take_turns_with_requests_that_run(asynchronous: bool) -> None:
    engine = Steps(asynchronous, budget=64)
    running = [engine.add(5, make=200) for _ in range(8)]
    engine.step()
    traced = [engine.add(60, traced=True, make=2) for _ in range(8)]
    while not all(name in engine.first for name in traced):
        engine.step()
        assert engine.steps < 100
    assert all(engine.shown[name][0] == 60 for name in traced)
    # What runs has stood aside for one step in several, and no more.
    for name in running:
        assert len(engine.shown[name]) >= engine.steps * (1 - 1 / PATIENCE)
    engine.drain()
    assert {len(engine.tokens[name]) for name in running} == {200}


def test_a_traced_prompt_is_not_overtaken_for_ever_where_there_are_priorities() -> None:
    # contract: F2
    engine = Steps(budget=64, scheduling_policy="priority")
    traced = engine.add(60, traced=True, make=2, priority=5)
    untraced = engine.add(60, make=2, priority=5)
    for _ in range(60):
        # More urgent ones come all the time, and leave half of each step.
        engine.add(30, make=1, priority=0)
        engine.step()
        if traced in engine.first:
            break
    assert engine.shown[traced][0] == 60
    engine.drain()
    assert engine.tokens[untraced] == [TOKEN] * 2


def test_a_prompt_that_waits_for_space_does_not_stop_the_others() -> None:
    # Two running requests take all the eight blocks in the end, and the prompt would take four.
    engine = Steps(budget=64, blocks=9)
    running = [engine.add(30, make=30) for _ in range(2)]
    engine.step()
    traced = engine.add(64, traced=True, make=2)
    while not all(name in engine.finished for name in running):
        engine.step()
    assert engine.steps == 30, "they have stood aside for nothing"
    engine.drain()
    assert {len(engine.tokens[name]) for name in running} == {30}
    assert engine.tokens[traced] == [TOKEN] * 2
    assert engine.shown[traced][0] == 64


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_that_may_edit_are_preempted_last(policy: str, asynchronous: bool) -> None:
    # contract: F4
    def run(plain: bool) -> tuple[Steps, dict[str, int], list[str]]:
        engine = Steps(asynchronous, budget=64, blocks=13, scheduling_policy=policy, plain=plain)
        preempted: dict[str, int] = {}
        names = [engine.add(15, make=60, priority=0), engine.add(15, make=60, priority=0)]
        names += [engine.add(15, traced=True, make=60, priority=3)]
        requests = dict(engine.scheduler.requests)
        engine.drain()
        return engine, {name: requests[name].num_preemptions for name in names}, names

    engine, preemptions, (*_, traced) = run(plain=False)
    assert preemptions[traced] == 0
    assert sum(preemptions.values()) > 0, "nothing was preempted, so it proves nothing"
    assert {len(tokens) for tokens in engine.tokens.values()} == {60}
    _, preemptions, _ = run(plain=True)
    assert preemptions[traced] > 0, "vLLM spares it anyway, so it proves nothing"


def test_a_preempted_request_keeps_its_own_priority() -> None:
    engine = Steps(budget=64, blocks=9, scheduling_policy="priority")
    low, high = engine.add(15, traced=True, make=80, priority=2), engine.add(15, traced=True, make=80, priority=1)
    requests = dict(engine.scheduler.requests)
    while not requests[low].num_preemptions:
        engine.step()
    assert requests[low].priority == 2
    assert not requests[high].num_preemptions
    engine.drain()
    assert {len(tokens) for tokens in engine.tokens.values()} == {80}


def test_a_preempted_request_that_outgrew_the_budget_goes_on_in_parts(asynchronous: bool) -> None:
    # contract: F4
    engine = Steps(asynchronous, budget=64, blocks=12)
    names = [engine.add(60, traced=True, make=40), engine.add(60, traced=True, make=40)]
    requests = dict(engine.scheduler.requests)
    engine.drain()
    preempted = [name for name in names if requests[name].num_preemptions]
    assert preempted, "nothing was preempted, so it proves nothing"
    assert all(engine.shown[name][0] == 60 for name in names)
    assert all(engine.tokens[name] == [TOKEN] * 40 for name in names)
    assert max(len([count for count in engine.shown[name] if count > 1]) for name in preempted) > 2


def test_a_block_ends_its_request_and_nothing_of_the_step_under_way_is_kept(asynchronous: bool) -> None:
    # contract: C6
    engine = Steps(asynchronous)
    counts, drops, other = (engine.add(10, traced=traced, make=30) for traced in (True, True, False))
    engine.ends = {(counts, 3): True, (drops, 3): False}
    engine.drain()
    assert engine.tokens[counts] == [TOKEN] * 4
    assert engine.tokens[drops] == [TOKEN] * 3
    assert engine.tokens[other] == [TOKEN] * 30
    # The step that was scheduled already is run, for nobody.
    assert len(engine.shown[counts]) == (5 if asynchronous else 4)
    assert str(engine.finished[counts]) == str(engine.finished[drops]) == "stop"
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 999
    assert not engine.scheduler.requests


def test_a_block_ends_its_request_with_the_token_that_ends_it_anyway(asynchronous: bool) -> None:
    # contract: C6
    engine = Steps(asynchronous)
    request = engine.add(10, traced=True, make=4)
    engine.ends = {(request, 3): True}
    engine.drain()
    assert engine.tokens[request] == [TOKEN] * 4
    assert len(engine.finished) == 1


def test_a_waiting_block_is_in_no_step_behind_the_last_token(asynchronous: bool) -> None:
    # contract: C5, F1
    engine = Steps(asynchronous)
    waits, over, untraced, free = (
        engine.add(10, traced=True, make=30, stops=True),
        engine.add(10, traced=True, make=30, stops=True),
        engine.add(10, make=30, stops=True),
        engine.add(10, traced=True, make=30),
    )
    engine.quiet = {(over, 0): True}
    for name in (waits, over, untraced):
        engine.says[name, 7] = END
    engine.drain()
    for name in (waits, over, untraced):
        assert engine.tokens[name] == [TOKEN] * 7 + [END]
    # Eight tokens take eight steps. vLLM runs one more where it runs ahead, and a block must not see that.
    assert len(engine.shown[waits]) == 8
    assert len(engine.shown[untraced]) == (9 if asynchronous else 8)
    # Blocks that are over, and requests that end by their length, run ahead as untraced ones do.
    assert len(engine.shown[over]) == len(engine.shown[untraced])
    assert len(engine.shown[free]) == 30
    assert engine.steps <= 33


def test_slots_of_requests_that_stand_aside_are_not_given_away() -> None:
    engine = Steps(asynchronous=True, max_num_seqs=2)
    waits = engine.add(10, traced=True, make=10, stops=True)
    others = [engine.add(10, make=10) for _ in range(4)]
    engine.drain()
    assert {len(engine.tokens[name]) for name in (waits, *others)} == {10}


def test_what_a_step_tells_the_scheduler_survives_a_promise() -> None:
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

    class Promise(AsyncModelRunnerOutput):
        def get_output(self) -> ModelRunnerOutput:
            return ModelRunnerOutput(["a"], {"a": 0}, [[1]])

    promise = Promise()
    internals.mark(promise, {"a": False}, ["b"], "split")
    found = pickle.loads(pickle.dumps(promise.get_output()))
    assert internals.marked(found) == ({"a": False}, ["b"], "split")
    assert internals.marked(ModelRunnerOutput(["a"], {"a": 0}, [[1]])) == ({}, [], "")
