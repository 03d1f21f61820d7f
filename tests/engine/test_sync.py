"""The synchronous path: names that are bound, invokes, steps, results, sites that cannot be, and engines that end."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import GREEDY, NOTHING_LEFT, PROMPTS, held, python, script, tokens_of
from oracle import assert_close, assert_steps_close

from endoscope import VLLMBackend, save
from endoscope.errors import (
    BlockError,
    NeverRanError,
    OutOfOrderError,
    UnknownModuleError,
    UnsupportedError,
)
from tests.conftest import options_of, path_of

bound_in_module: Any = None


@pytest.fixture
def model(sync_model: Any) -> Any:
    """The synchronous tiny Llama, with nothing left over in it after the test."""
    model = sync_model("tiny-llama")
    yield model
    assert held(model.debug()) == NOTHING_LEFT


@pytest.fixture
def its(oracle: Any) -> Any:
    """The oracle of the tiny Llama."""
    return oracle("tiny-llama")


def logits_of(its: Any, prompt: str, steps: int = 1) -> list[torch.Tensor]:
    return its.run(prompt, steps, [("logits", None)])["logits", None]


# The with and its names


def test_sync_is_the_default_and_runs_on_llm(model: Any) -> None:  # contract: B1
    """Without a mode the engine is `vllm.LLM`."""
    from vllm import LLM

    assert isinstance(model.engine.llm, LLM)
    with model.trace(PROMPTS[0], max_tokens=1) as tracer:
        pass
    assert isinstance(tracer.backend, VLLMBackend)


def test_with_returns_when_the_requests_are_done(model: Any, its: Any) -> None:  # contract: B1
    """Right behind the `with` everything is there, and the engine follows no request any more."""
    with model.trace(PROMPTS[0], max_tokens=3, **GREEDY) as tracer:
        logits = model.logits.save()
    assert tracer.result.finished
    assert model.engine.llm.llm_engine.get_num_unfinished_requests() == 0
    assert tokens_of(tracer.result) == its.run(PROMPTS[0], 3).tokens
    assert_close(logits, logits_of(its, PROMPTS[0])[0])


def test_names_in_a_function_and_a_nested_one(model: Any, its: Any) -> None:  # contract: B2
    """A function's own variable, one that a nested function reads, and one that is the outer function's."""
    outer = None

    def inner() -> tuple[Any, Any]:
        nonlocal outer
        with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
            own = model.logits.save()
            outer = model.logits.save()
        return own, lambda: own

    own, read = inner()
    assert_close(own, logits_of(its, PROMPTS[0])[0])
    assert read() is own
    assert torch.equal(outer, own)


def test_names_in_a_method_and_a_global(model: Any, its: Any) -> None:  # contract: B2
    """In a method; and a name that the function declares global is bound in the module."""

    class Reader:
        def read(self) -> Any:
            global bound_in_module
            with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
                bound_in_module = model.logits.save()
                own = bound_in_module
            return own

    own = Reader().read()
    assert_close(own, logits_of(its, PROMPTS[0])[0])
    assert torch.equal(bound_in_module, own)


async def test_names_in_a_coroutine(model: Any, its: Any) -> None:  # contract: B2
    """A synchronous trace in a coroutine binds there."""

    async def read() -> Any:
        with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
            own = model.logits.save()
        return own

    assert_close(await read(), logits_of(its, PROMPTS[0])[0])


def test_names_in_a_module(model: Any, its: Any, tmp_path: Path) -> None:  # contract: B2
    """A trace at the top of a module's file binds names of the module."""
    path = script(
        tmp_path,
        f"""
        from engine_of_test import model

        with model.trace({PROMPTS[0]!r}, max_tokens=1, temperature=0.0):
            logits = model.logits.save()
        """,
        "traced_module.py",
    )
    holder = type(sys)("engine_of_test")
    holder.model = model
    sys.modules["engine_of_test"] = holder
    try:
        spec = importlib.util.spec_from_file_location("traced_module", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        del sys.modules["engine_of_test"]
    assert_close(module.logits, logits_of(its, PROMPTS[0])[0])


def test_saves_without_a_name_come_under_their_text(model: Any, its: Any) -> None:  # contract: B2
    """What is bound to no name stands in `tracer.saves` under the text of its expression; named saves do too."""
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY) as tracer:
        model.model.layers[1].resid_post.save()
        model.logits.save()
        top = model.logits.argmax(-1).save()
    assert set(tracer.saves) == {"model.model.layers[1].resid_post", "model.logits", "top"}
    run = its.run(PROMPTS[0], 1, [("resid_post", 1), ("logits", None)])
    assert_close(tracer.saves["model.logits"], run["logits", None][0])
    assert_close(tracer.saves["model.model.layers[1].resid_post"], run["resid_post", 1][0])
    assert tracer.saves["top"] is top
    assert top.tolist() == run.tokens


def test_save_of_any_value_and_in_a_helper(model: Any) -> None:  # contract: C1
    """Lists, dicts, numbers and text come home; `endoscope.save` marks a value in a helper function."""

    def helper(value: Any) -> Any:
        return save({"rows": value.shape[0]})

    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        found = helper(model.model.layers[0].resid_post)
        nested = {"a": [1, 2.5, "three"], "b": (None, True)}.save()
        number = 7
        number.save()
    assert found == {"rows": len(model.tokenizer(PROMPTS[0])["input_ids"])}
    assert nested == {"a": [1, 2.5, "three"], "b": (None, True)}
    assert number == 7


def test_what_is_not_saved_stays_in_the_engine(model: Any) -> None:  # contract: B2
    """A name that the block binds and does not save is as it was before."""
    kept = "before"
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY) as tracer:
        kept = model.logits
        logits = model.logits + 1
        logits.save()
    assert kept == "before"
    assert set(tracer.saves) == {"logits"}


def test_outside_values_travel(model: Any, its: Any) -> None:  # contract: C1
    """Tensors, functions of this file, classes, modules by name, and the model's own modules."""
    vector = torch.arange(its.width, dtype=torch.float32)
    layer = model.model.layers[2]

    class Scaled:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, value: torch.Tensor) -> torch.Tensor:
            return value * self.by + vector

    scaled = Scaled(2.0)
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        stream = layer.resid_post
        result = scaled(stream).save()
        sorted_again = torch.sort(stream, dim=-1).values.save()
        folder = os.sep.save()
    expected = its.run(PROMPTS[0], 1, [("resid_post", 2)])["resid_post", 2][0]
    assert_close(result, expected * 2 + vector)
    assert_close(sorted_again, expected.sort(dim=-1).values)
    assert folder == os.sep


def test_case_30_a_view_ships_only_its_own_bytes(model: Any) -> None:
    """One row of a large tensor arrives without the rest of its storage."""
    with model.trace(PROMPTS[3], max_tokens=1, **GREEDY):
        row = model.model.layers[0].resid_post[-1].save()
    assert row.untyped_storage().nbytes() == row.nbytes


# Several requests


def test_invokes_with_their_own_sampling(model: Any, its: Any) -> None:  # contract: B3
    """Several requests in one batch: one value each in a list, a name of one invoke alone is that value."""
    with model.trace(max_tokens=4, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            logits = model.logits.save()
            only = "first".save()
        with tracer.invoke(PROMPTS[1], max_tokens=2):
            logits = model.logits.save()
        with tracer.invoke(PROMPTS[2]):
            logits = model.logits.save()
    assert [len(tokens_of(output)) for output in tracer.result] == [4, 2, 4]
    assert only == "first"
    assert isinstance(logits, list)
    for value, prompt, output in zip(logits, PROMPTS, tracer.result, strict=False):
        assert_close(value, logits_of(its, prompt)[0])
        assert tokens_of(output) == its.run(prompt, 4).tokens[: len(tokens_of(output))]
        assert output.prompt == prompt


def test_invokes_made_in_a_loop_and_in_a_function(model: Any, its: Any) -> None:  # contract: B3
    """The body around the invokes is ordinary Python."""
    used = []

    def ask(tracer: Any, prompt: str) -> None:
        used.append(prompt)
        with tracer.invoke(prompt):
            model.logits.save()

    with model.trace(max_tokens=1, **GREEDY) as tracer:
        for prompt in PROMPTS[:3]:
            ask(tracer, prompt)
    assert used == list(PROMPTS[:3])
    for value, prompt in zip(tracer.saves["model.logits"], used, strict=True):
        assert_close(value, logits_of(its, prompt)[0])


def test_case_26_n_sequences(model: Any, its: Any) -> None:  # contract: B3
    """With `n=3` a save is three values in the order of the sequences, each of its own tokens."""
    with model.trace(PROMPTS[0], max_tokens=3, n=3, temperature=1.0, seed=5, ignore_eos=True) as tracer:
        first = model.logits.save()
        seen = [].save()
        for _ in tracer.iter[:]:
            seen.append(int(model.samples))
    assert len(first) == len(seen) == len(tracer.result.outputs) == 3
    for sequence, (logits, tokens) in enumerate(zip(first, seen, strict=True)):
        assert_close(logits, logits_of(its, PROMPTS[0])[0])
        assert tokens == list(tracer.result.outputs[sequence].token_ids)
    assert len({tuple(tokens) for tokens in seen}) > 1, "the sequences are alike, so their order is not seen"


def test_generate_just_runs_the_engine(model: Any, its: Any) -> None:  # contract: B4
    """One prompt or several, as text or tokens, in order."""
    (one,) = model.generate(PROMPTS[0], max_tokens=2, **GREEDY)
    assert tokens_of(one) == its.run(PROMPTS[0], 2).tokens
    (same,) = model.generate(its.tokens(PROMPTS[0]), max_tokens=2, **GREEDY)
    assert tokens_of(same) == tokens_of(one)
    several = model.generate(list(PROMPTS), max_tokens=2, **GREEDY)
    assert [tokens_of(output) for output in several] == [its.run(prompt, 2).tokens for prompt in PROMPTS]


def test_prompts_of_every_kind(model: Any, its: Any) -> None:  # contract: B1
    """Text, tokens, a tensor of them, what a tokenizer returns, and vLLM's dicts are one prompt each."""
    ids = its.tokens(PROMPTS[0])
    expected = logits_of(its, PROMPTS[0])[0]
    kinds = (
        ids,
        tuple(ids),
        torch.tensor(ids),
        torch.tensor([ids]),
        its.tokenizer(PROMPTS[0]),
        its.tokenizer(PROMPTS[0], return_tensors="pt"),
        {"prompt": PROMPTS[0]},
        {"prompt_token_ids": ids},
    )
    with model.trace(max_tokens=1, **GREEDY) as tracer:
        for kind in kinds:
            with tracer.invoke(kind):
                model.logits.save()
    assert len(tracer.saves["model.logits"]) == len(kinds)
    for value in tracer.saves["model.logits"]:
        assert_close(value, expected)


def test_the_model_can_be_used_from_its_own_block(model: Any, its: Any) -> None:  # contract: C1
    """A logit lens: the model's own norm and head, called inside the block on a middle layer's stream."""
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        stream = model.model.layers[1].resid_post[-1:]
        lens = model.logits_processor(model.lm_head, model.model.norm(stream)).save()
        logits = model.logits.save()
    hidden = its.run(PROMPTS[0], 1, [("resid_post", 1)])["resid_post", 1][0][-1:]
    with torch.no_grad():
        expected = its.model.lm_head(its.model.model.norm(hidden))
    assert_close(lens, expected)
    assert_close(logits, logits_of(its, PROMPTS[0])[0])


# Steps


@pytest.mark.parametrize(
    ("start", "stop", "by", "steps"),
    [(None, None, None, [0, 1, 2, 3, 4]), (1, 3, None, [1, 2]), (None, 2, None, [0, 1]), (3, None, None, [3, 4]),
     (0, 5, 2, [0, 2, 4]), (7, 9, None, [])],
)  # fmt: skip
# contract: C5
def test_iter_over_slices(start: Any, stop: Any, by: Any, steps: list[int], model: Any, its: Any) -> None:
    """One pass of the loop for each chosen generated step."""
    with model.trace(PROMPTS[0], max_tokens=5, **GREEDY) as tracer:
        seen, logits = [].save(), [].save()
        for step in tracer.iter[start:stop:by]:
            seen.append(step)
            logits.append(model.logits)
    assert seen == steps
    assert_steps_close(logits, [logits_of(its, PROMPTS[0], 5)[step] for step in steps])


def test_all_and_next(model: Any, its: Any) -> None:  # contract: C5
    """`tracer.all()` is every step, `tracer.next()` goes on by one."""
    with model.trace(max_tokens=3, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            logits = [].save()
            for _ in tracer.all():
                logits.append(model.logits)
        with tracer.invoke(PROMPTS[0]):
            logits = [model.logits].save()
            numbers = [tracer.next()].save()
            logits.append(model.logits)
            numbers.append(tracer.next())
            logits.append(model.logits)
    assert numbers == [1, 2]
    for values in logits:
        assert_steps_close(values, logits_of(its, PROMPTS[0], 3))


def test_case_10_a_loop_that_outruns_the_request(model: Any, its: Any) -> None:  # contract: C5
    """The loop ends with the request, the code after it runs, and every save is kept."""
    with model.trace(PROMPTS[0], max_tokens=3, **GREEDY) as tracer:
        before = model.model.layers[0].resid_post.save()
        count = 0
        for _ in tracer.iter[:100]:
            last = model.logits
            count += 1
        last.save()
        count.save()
        after = "ran".save()
    run = its.run(PROMPTS[0], 3, [("resid_post", 0), ("logits", None)])
    assert_close(before, run["resid_post", 0][0])
    assert_close(last, run["logits", None][2])
    assert (count, after) == (3, "ran")
    assert tokens_of(tracer.result) == run.tokens


def test_next_after_the_end(model: Any) -> None:  # contract: C5, C8
    """`tracer.next()` past the last step says that the request had ended; in the block it can be caught."""
    with pytest.raises(NeverRanError, match="ended"), model.trace(PROMPTS[0], max_tokens=1, **GREEDY) as tracer:
        tracer.next()
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY) as tracer:
        try:
            tracer.next()
        except RuntimeError:
            caught = "caught".save()
    assert caught == "caught"


def test_steps_that_cannot_be_are_refused(model: Any) -> None:  # contract: C5
    """A negative step cannot be known in advance."""
    with pytest.raises(ValueError, match="-1 is refused"), model.trace(PROMPTS[0], max_tokens=1) as tracer:
        for _ in tracer.iter[-1:]:
            pass


@pytest.mark.parametrize("where", ["at the first step", "in a loop", "in a helper"])
def test_case_08_stop_ends_the_block_from_anywhere(where: str, model: Any, its: Any) -> None:  # contract: C6
    """`tracer.stop()` ends its own request; the loop around the trace and the others of the batch go on."""

    def deep(tracer: Any) -> None:
        for _ in range(10):
            tracer.stop()

    turns = []
    for turn in range(2):
        with model.trace(max_tokens=5, **GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                logits = model.logits.save()
                if where == "at the first step":
                    tracer.stop()
                for step in tracer.iter[1:]:
                    reached = step
                    reached.save()
                    if step == 2:
                        deep(tracer) if where == "in a helper" else tracer.stop()
                never = "reached".save()
            with tracer.invoke(PROMPTS[2]):
                pass
        turns.append(turn)
        run = its.run(PROMPTS[0], 5, [("logits", None)])
        assert_close(logits, run["logits", None][0])
        assert "never" not in tracer.saves
        stopped, other = tracer.result
        # The step in which a block stops before its token is sampled gives none.
        assert tokens_of(stopped) == run.tokens[: 0 if where == "at the first step" else 2]
        assert stopped.outputs[0].text == its.text(tokens_of(stopped))
        assert stopped.outputs[0].finish_reason == "stop"
        assert tracer.saves.get("reached") == (None if where == "at the first step" else 2)
        assert tokens_of(other) == its.run(PROMPTS[2], 5).tokens
    assert turns == [0, 1]


@pytest.mark.parametrize("after", ["logits", "samples"])
def test_stop_whatever_the_sampling_says(after: str, model: Any, its: Any) -> None:  # contract: C6
    """The request ends at that step in spite of `min_tokens`; a token that was sampled before the stop counts."""
    with model.trace(PROMPTS[0], max_tokens=8, min_tokens=8, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            if after == "logits":
                model.logits.argmax()
            else:
                model.samples.max()
            if step == 1:
                tracer.stop()
    assert tokens_of(tracer.result) == its.run(PROMPTS[0], 2).tokens[: 1 if after == "logits" else 2]
    assert tracer.result.outputs[0].text == its.text(tokens_of(tracer.result))


# Result, cache, barrier


def test_result_is_the_finished_output(model: Any, its: Any) -> None:  # contract: C7
    """Saved in a block it is the very output that `tracer.result` is."""
    with model.trace(PROMPTS[0], max_tokens=2, **GREEDY) as tracer:
        output = tracer.result.save()
    assert output is tracer.result
    assert output.finished
    assert output.saves == tracer.saves
    assert tokens_of(output) == its.run(PROMPTS[0], 2).tokens


def test_cache_keeps_every_visit(model: Any, its: Any) -> None:  # contract: C7
    """Modules by reference, path and pattern; one output for each visit, of this request's rows only."""
    with model.trace(max_tokens=3, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            cache = tracer.cache(modules=[model.model.layers[1].mlp, "model.layers.2.mlp"])
        with tracer.invoke(PROMPTS[2]):
            cache = tracer.cache(modules="model.layers.*.mlp")
        with tracer.invoke(PROMPTS[1]):
            pass
    assert set(cache[0]) == {"model.layers.1.mlp", "model.layers.2.mlp"}
    assert set(cache[1]) == {f"model.layers.{layer}.mlp" for layer in range(its.depth)}
    for number, prompt in enumerate((PROMPTS[0], PROMPTS[2])):
        run = its.run(prompt, 3, [("mlp", layer) for layer in range(its.depth)])
        for path, values in cache[number].items():
            assert_steps_close(values, run["mlp", int(path.split(".")[2])], path)


def test_barrier_is_refused_by_name(model: Any) -> None:  # contract: C7
    """In a block and outside of one, with the reason."""
    with pytest.raises(UnsupportedError, match="barrier"), model.trace(max_tokens=1) as tracer:
        tracer.barrier(2)
    with pytest.raises((UnsupportedError, BlockError), match="barrier") as caught:
        with model.trace(PROMPTS[0], max_tokens=1) as tracer:
            tracer.barrier(2)
    assert "independently" in str(caught.value)


# Sites that cannot be


def test_sites_out_of_order(model: Any) -> None:  # contract: C8
    """The error names what was asked for and where the block had stopped before."""
    with pytest.raises(OutOfOrderError) as caught, model.trace(PROMPTS[0], max_tokens=2, **GREEDY):
        later = model.model.layers[2].output.save()
        model.model.layers[1].mlp.output.save()
    said = str(caught.value)
    assert "model.layers.1.mlp.output" in said
    assert "model.layers.2.output" in said
    assert "comes first" in said
    assert caught.value.output.saves.keys() == {"later"}


def test_a_module_that_does_not_exist(model: Any) -> None:  # contract: C8
    """The error names it, the nearest that there are, and what the module has."""
    with pytest.raises(UnknownModuleError) as caught, model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        model.model.layers[1].mpl.output.save()
    said = str(caught.value)
    assert "model.layers.1.mpl" in said
    assert "model.layers.1.mlp" in said
    assert isinstance(caught.value, AttributeError)
    with pytest.raises(UnknownModuleError, match="it has 4 modules"), model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        model.model.layers[4].output.save()


def test_a_module_that_never_ran(model: Any) -> None:  # contract: C8
    """vLLM does not call its head as a module: the error says that it did not run."""
    with pytest.raises(NeverRanError) as caught, model.trace(PROMPTS[0], max_tokens=2, **GREEDY):
        model.lm_head.output.save()
    assert "lm_head.output" in str(caught.value)
    assert "did not run" in str(caught.value)


def test_a_site_in_a_step_that_the_request_never_had(model: Any) -> None:  # contract: C8
    """What was saved before it is on the error."""
    with pytest.raises(NeverRanError, match="ended"), model.trace(PROMPTS[0], max_tokens=1, **GREEDY) as tracer:
        logits = model.logits.save()
        tracer.next()
        model.logits.save()
    assert set(tracer.saves) == {"logits"}
    assert logits.shape[0] == 1


# Engines that start and end


SCRIPT = f"""
import json, os, psutil

print("the script runs")
from endoscope import VLLM
from endoscope.errors import EngineClosedError, OutOfOrderError

def scale(value):
    return value * 2

def children():
    # Python's own helper for shared memory stays until the program ends.
    return {{c for c in psutil.Process().children(recursive=True) if "resource_tracker" not in "".join(c.cmdline())}}

seen = {{}}
try:
    with VLLM({path_of("tiny-llama")!r}, **{options_of("tiny-llama")!r}) as model:
        seen["before"] = len(children())
        try:
            with model.trace("hello there", max_tokens=2, temperature=0.0):
                model.model.layers[2].output.save()
                model.model.layers[1].output.save()
        except OutOfOrderError as error:
            seen["order"] = str(error)
        with model.trace("hello there", max_tokens=1, temperature=0.0) as tracer:
            stream = scale(model.model.layers[1].resid_post).save()
        seen["shape"] = list(stream.shape)
        (plain,) = model.generate("hello there", max_tokens=1, temperature=0.0)
        seen["same"] = plain.outputs[0].token_ids == tracer.result.outputs[0].token_ids
        started = children()
        seen["started"] = len(started)
        1 / 0
except ZeroDivisionError:
    gone, alive = psutil.wait_procs(started, timeout=30)
    seen["alive"] = len(alive)
model.close()
try:
    model.generate("more")
except EngineClosedError as error:
    seen["closed"] = str(error)
seen["flags"] = [name for name in os.environ if "INSECURE" in name]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def script_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, Any]]:
    """What the script printed, and what it saw."""
    done = python(script(tmp_path_factory.mktemp("script"), SCRIPT))
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.strip().split("\n")
    return lines, json.loads(last)


def test_script_without_a_guard_for_main(script_run: Any) -> None:  # contract: B4
    """The script runs once, though the engine is a new process of Python."""
    lines, seen = script_run
    assert lines == ["the script runs"]
    assert seen["same"] is True


def test_script_case_05_starts_the_engine_with_the_first_trace(script_run: Any) -> None:  # contract: B4
    """Before the first trace there is no process, and the trace starts one."""
    _, seen = script_run
    assert seen["before"] == 0
    assert seen["started"] > 0
    assert seen["shape"] == [2, 128]


def test_script_case_28_needs_no_flag(script_run: Any) -> None:
    """No variable that allows insecure serialization is set, and a function of the script travelled."""
    _, seen = script_run
    assert seen["flags"] == []
    assert seen["shape"] == [2, 128]


def test_script_leaves_no_process(script_run: Any) -> None:  # contract: B4
    """`with VLLM(...)` ends every process also when its body raises; closing again does nothing."""
    _, seen = script_run
    assert seen["alive"] == 0
    assert "closed" in seen["closed"]


def test_script_sites_out_of_order_in_the_first_pass_ever(script_run: Any) -> None:  # contract: C8
    """Before the engine has seen one pass it knows no order, and still says so."""
    _, seen = script_run
    assert "model.layers.1.output" in seen["order"]
    assert "model.layers.2.output" in seen["order"]


@pytest.mark.skipif("ENDOSCOPE_TEST_IN_PROCESS" in os.environ, reason="this is the run in one process")
def test_everything_in_one_process() -> None:  # contract: B1
    """With vLLM's engine in the caller's own process the same tests hold."""
    chosen = (
        "tiny-llama and not stream and not script and not process and not gear"
        " and (test_every_site or test_input or test_case_12 or does_not_fit or never_changes or logits)"
        " or test_sync.py and not process and not script"
        " or test_failures and sync and not stream and not smollm2 and not tiny-gpt2"
        " or one_engine_in_a_process"
    )
    done = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-k", chosen, "tests/engine",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", ENDOSCOPE_TEST_IN_PROCESS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "passed" in done.stdout
