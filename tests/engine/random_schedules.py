"""Random schedules: requests with and without random blocks that come and go on one engine.

A schedule is written as a Python script that runs alone. A test runs that very text, so what it prints when it fails is
what failed.
"""

from __future__ import annotations

import asyncio
import itertools
import linecache
from dataclasses import dataclass
from typing import Any

import torch
from engine_support import NOTHING_LEFT, held
from hypothesis import assume
from hypothesis import strategies as st
from oracle import TOLERANCE, distance
from random_blocks import Expected, Program, RandomOracle, programs
from vllm.v1.metrics.reader import get_metrics_snapshot

from endoscope.errors import BlockError, PreemptionError
from endoscope.vllm import internals

MODEL = "tiny-llama"
_ALL = {
    "dtype": "float32",
    "block_size": 32,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "kv_cache_memory_bytes": 1 << 26,
}
# Of the blocks of keys and values one is vLLM's own, and a request takes one or, beyond 32 tokens, two.
ENGINES: dict[str, dict[str, Any]] = {
    "cramped": {**_ALL, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 4, "enable_prefix_caching": True},
    "roomy": {**_ALL, "max_num_batched_tokens": 64, "enable_prefix_caching": True},
    "most cramped": {
        **_ALL,
        "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 3,
        "enable_prefix_caching": False,
    },
    "roomy without a cache": {**_ALL, "max_num_batched_tokens": 32, "enable_prefix_caching": False},
}
LONGEST = 8  # tokens that a request generates
OVER = 1000  # outputs: as many as a request gives when it is over
TIMEOUT = 30  # seconds; an example takes less than one

# Prompts are beginnings of these, so that many are alike or begin alike.
STORIES = [torch.randint(3, 40_000, (60,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(2)]


class Lost(BaseException):
    """The engine died, or gives no answer. Hypothesis lets it pass: nothing smaller can be tried on that engine."""


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        story: which of ``STORIES`` the prompt is the beginning of.
        length: of the prompt.
        tokens: how many it generates.
        program: its block, if it has one.
        after: an earlier request and a number of outputs: when that has given so many, or is over, this one comes.
        abort: the number of outputs after which it is abandoned.
    """

    story: int
    length: int
    tokens: int
    program: Program | None
    after: tuple[int, int] | None
    abort: int | None

    @property
    def prompt(self) -> list[int]:
        return STORIES[self.story][: self.length]

    def text(self, number: int) -> list[str]:
        arguments = f"{self.prompt}, max_tokens={self.tokens}, temperature=0.0, ignore_eos=True"
        if self.program is None:
            return [f"def start_{number}(model):", f"    return model.generate({arguments})"]
        head = [f"def start_{number}(model):", f"    with model.trace({arguments}) as tracer:"]
        return [*head, *(f"        {line}" for line in self.program.text()), "    return tracer.backend"]


DRIVER = '''

async def follow(number, model, given, changed):
    """Submit a request when its time has come, and take its outputs; returns what it gave."""
    start, after, abort = REQUESTS[number]
    while after is not None and given[after[0]] < after[1]:
        changed.clear()
        await changed.wait()
    found = {"tokens": [], "finish": None, "saves": {}, "emits": [], "error": None, "aborted": False}

    def take(output):
        (completion,) = output.outputs
        found["tokens"], found["finish"] = list(completion.token_ids), completion.finish_reason
        rows = output.emits.get("row", [])
        found["emits"] += rows if isinstance(rows, list) else [rows]
        found["saves"] = output.saves
        given[number] += 1
        changed.set()

    try:
        outputs = aiter(start(model))
        if abort == 0:
            found["aborted"] = True
            await outputs.aclose()
        else:
            async for output in outputs:
                take(output)
                if given[number] == abort and not output.finished:
                    found["aborted"] = True
                    await outputs.aclose()
                    break
    except Exception as error:
        found["error"] = error
        if hasattr(error, "output"):
            take(error.output)
    finally:
        given[number] = float("inf")
        changed.set()
    return found


async def run(model):
    """Run all requests; returns what each gave."""
    given, changed = [0] * len(REQUESTS), asyncio.Event()
    # Those that wait look whenever an output has come, in whatever order they are woken.
    return await asyncio.gather(*[follow(number, model, given, changed) for number in range(len(REQUESTS))])
'''

MAIN = """

async def main():
    async with VLLM(MODEL, mode="async", **ENGINE) as model:
        for number, found in enumerate(await run(model)):
            print(f"request {number}: {found}")
        print("left in the engine:", await model.debug())


if __name__ == "__main__":
    asyncio.run(main())
"""


@dataclass(frozen=True)
class Schedule:
    """Requests, in the order in which they are written."""

    requests: tuple[Asked, ...]

    def module(self) -> str:
        """The text of a module with the requests, and with ``run(model)``."""
        lines = ["import asyncio", "", "import torch", "", "from endoscope import VLLM", ""]
        lines += ["", "class Wrong(Exception):", "    pass", ""]
        for number, request in enumerate(self.requests):
            lines += ["", *request.text(number), ""]
        lines += [
            "",
            "# What starts a request; the request and the number of its outputs that it comes after; the number",
        ]
        lines += ["# of outputs after which it is abandoned.", "REQUESTS = ["]
        lines += [f"    (start_{n}, {request.after}, {request.abort})," for n, request in enumerate(self.requests)]
        return "\n".join([*lines, "]"]) + DRIVER

    def script(self, engine: dict[str, Any], path: str) -> str:
        """The whole of it as a program that runs alone."""
        return f"{self.module()}\n\nMODEL = {path!r}\nENGINE = {engine!r}\n{MAIN}"

    async def run(self, model: Any) -> list[dict[str, Any]]:
        """Run it on an engine; returns what each request gave."""
        text = self.module()
        filename = f"<random schedule {next(_numbers)}>"
        # Blocks are read from their file's lines.
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        try:
            names: dict[str, Any] = {"__name__": "random_schedule"}
            exec(compile(text, filename, "exec"), names)
            async with asyncio.timeout(TIMEOUT):
                found: list[dict[str, Any]] = await names["run"](model)
            return found
        finally:
            del linecache.cache[filename]

    def expected(self, oracle: RandomOracle) -> list[Expected]:
        """What each request gives alone. Hypothesis drops a schedule in which rounding decides about a token."""
        nothing = Program((), "next")
        found = [(each.program or nothing).acted_out(oracle, each.prompt, each.tokens) for each in self.requests]
        assume(not any(one.tie for one in found))
        return found


_numbers = itertools.count()


async def check(schedule: Schedule, expected: list[Expected], model: Any, preempts: bool) -> list[str]:
    """Run a schedule and compare it with what is expected of each request; returns how each ended.

    Raises:
        AssertionError: with the script, if anything is not as it should be.
        Lost: with the script, if the engine died or a request never ends.
    """
    await model.engine.llm.reset_prefix_cache()
    script = schedule.script(model._options, model._name)
    try:
        found = await schedule.run(model)
        ends = [
            _agree(number, request, its, one, preempts)
            for number, (request, its, one) in enumerate(zip(schedule.requests, expected, found, strict=True))
        ]
        await _nothing_left(model)
        return ends
    except TimeoutError:
        raise Lost(f"the requests are not over after {TIMEOUT} s\n\n{script}") from None
    except AssertionError as error:
        failure = Lost if internals.dead(model.engine.llm) else AssertionError
        raise failure(f"{error}\n\n{script}") from None


def _agree(number: int, request: Asked, its: Expected, found: dict[str, Any], preempts: bool) -> str:
    """Fail unless a request gave what it gives alone; returns how it ended."""
    who, tokens, error, program = f"request {number}", found["tokens"], found["error"], request.program
    if found["aborted"]:
        assert error is None, f"{who} was abandoned and raised {error!r}"
        assert tokens == its.tokens[: len(tokens)], f"{who} has the tokens {tokens} in place of {its.tokens}"
        return "aborted"
    if isinstance(error, PreemptionError):
        assert preempts, f"{who} was preempted where there is space for all: {error}"
        assert program is not None, f"{who} has no block and raised {error}"
        assert program.edits, f"{who} edits nothing and raised {error}"
        held, emitted = found["saves"].get("held", []), found["emits"]
        # What the block had before is right, and so is what it may do behind its steps.
        _same(f"{who}: held before it was preempted", held, its.held[: len(held)])
        _same(f"{who}: emitted before it was preempted", emitted, its.emitted[: len(emitted)])
        return "preempted"
    if its.end == "raise":
        assert isinstance(error, BlockError), f"{who} should have raised Wrong, and gave {error!r}"
        assert type(error).__name__ == "Wrong", f"{who} should have raised Wrong, and raised {error!r}"
    else:
        assert error is None, f"{who} raised {error!r}"
        wanted = "stop" if len(its.tokens) < request.tokens else "length"
        assert found["finish"] == wanted, f"{who} finished by {found['finish']} in place of {wanted}"
    assert tokens == its.tokens, f"{who} has the tokens {tokens} in place of {its.tokens}"
    if program is None:
        assert found["saves"] == {}
        return "untraced"
    _same(f"{who}: held", found["saves"]["held"], its.held)
    _same(f"{who}: emitted", found["emits"], its.emitted)
    return its.end or "finished"


def _same(what: str, found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected), f"{what} {len(found)} values in place of {len(expected)}"
    for index, (mine, its) in enumerate(zip(found, expected, strict=True)):
        where = f"{what}[{index}]"
        if not isinstance(its, torch.Tensor):
            assert mine == its, f"{where} is {mine!r} in place of {its!r}"
        elif its.is_floating_point():
            assert getattr(mine, "dtype", None) == torch.float32, f"{where} is {mine!r}"
            far = distance(torch.atleast_2d(mine), torch.atleast_2d(its))
            assert far <= TOLERANCE, f"{where} differs from the oracle's by {far:.2e} of its length"
        else:
            assert mine.tolist() == its.tolist(), f"{where} is {mine.tolist()} in place of {its.tolist()}"


def preemptions() -> int:
    """How many requests the engine that was built last has preempted."""
    return sum(getattr(each, "value", 0) for each in get_metrics_snapshot() if each.name == "vllm:num_preemptions")


async def _nothing_left(model: Any) -> None:
    llm = model.engine.llm
    for _ in range(50):
        counts, waiting = held(await model.debug()), llm.output_processor.get_num_unfinished_requests()
        if counts == NOTHING_LEFT and not waiting:
            break
    assert counts == NOTHING_LEFT, f"the engine still holds {counts}"
    assert waiting == 0, f"the client still follows {waiting} requests"
    assert model.engine.inbox.arrivals == {}, f"{len(model.engine.inbox.arrivals)} are still waited for"


# Strategies


@st.composite
def schedules(draw: st.DrawFn, budget: int) -> Schedule:
    """Up to five requests for an engine whose steps take so many tokens."""
    requests: list[Asked] = []
    for number in range(draw(st.sampled_from([1, 2, 3, 4, 4, 5, 5]))):
        tokens = draw(st.sampled_from([1, 2, 3, 5, LONGEST, LONGEST, LONGEST]))
        program = draw(st.none() | programs(tokens) | programs(tokens))
        longest = min(budget, 50) if program is not None else 50  # a traced prompt is run in one step
        # Many prompts are alike, and a little shorter or longer than a block of keys and values.
        edge = st.integers(min(26, longest), min(32, longest)), st.integers(min(33, longest), min(44, longest))
        story, length = draw(st.sampled_from([0, 0, 0, 1])), draw(st.integers(1, longest) | st.one_of(*edge))
        after = None
        if number:
            if draw(st.booleans()):
                # The prompt of an earlier one: what that one's block did must not be found in the cache.
                twin = requests[draw(st.integers(0, number - 1))]
                story, length = twin.story, min(twin.length, longest)
            after = draw(st.none() | st.tuples(st.integers(0, number - 1), st.sampled_from([0, 1, 3, 6, OVER])))
        requests.append(
            Asked(
                story=story,
                length=length,
                tokens=tokens,
                program=program,
                after=after,
                abort=draw(st.sampled_from([None] * 6 + [0, 1, 3])),
            )
        )
    return Schedule(tuple(requests))
