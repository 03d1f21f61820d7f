"""Each step runs in the fastest gear that its blocks leave it, and a request's numbers are the same in all of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_support import GREEDY, PROMPTS, environment, held, layers_of, parts_of, tokens_of
from oracle import Edit, assert_close, assert_steps_close

from endoscope import VLLM
from endoscope.errors import EngineArgumentError, OutOfOrderError, UnknownModuleError
from tests.conftest import options_of, path_of

STEPS = 4
NAMES = ("tiny-llama", "tiny-gpt2")
KW: dict[str, Any] = {"max_tokens": STEPS, **GREEDY}


def gears(graph: int = 0, split: int = 0, eager: int = 0) -> dict[str, int]:
    """What an output tells of its steps."""
    return {"graph": graph, "split": split, "eager": eager}


@pytest.fixture(scope="module")
def compiled() -> Iterator[Any]:
    """Gives the compiled model of a name."""
    models: dict[str, VLLM] = {}

    def get(name: str) -> VLLM:
        if name not in models:
            model = models[name] = VLLM(path_of(name), **{**options_of(name), "enforce_eager": False})
        return models[name]

    yield get
    for model in models.values():
        assert held(model.debug()) == {"probes": 0, "requests": 0, "hooks": 0, "bytes": 0}
        model.close()


def first(value: Any) -> Any:
    """The value of a module that hands the residual stream on beside it."""
    return value[0] if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", NAMES)  # contract: F1
def test_a_finished_block_and_one_that_reads_logits_cost_no_gear(name: str, compiled: Any, oracle: Any) -> None:
    model, its = compiled(name), oracle(name)
    layers = layers_of(model)
    run = its.run(PROMPTS[0], steps=STEPS, reads=[("logits", None), ("resid_post", 1)])
    with model.trace(PROMPTS[0], **KW) as tracer:
        result = tracer.result.save()
        seen = [].save()
        for _ in tracer.iter[:]:
            seen.append(model.logits)
            model.samples = model.samples
    assert result.gears == gears(graph=STEPS)
    assert_steps_close(seen, run.values["logits", None], "logits")
    with model.trace(PROMPTS[0], **KW) as tracer:
        result = tracer.result.save()
        h = layers[1].resid_post.save()
    assert result.gears == gears(graph=STEPS - 1, split=1)
    assert_close(h, run.values["resid_post", 1][0], "the stream")
    assert tokens_of(result) == run.tokens


@pytest.mark.parametrize("name", NAMES)
def test_every_tap_is_read_as_in_the_eager_gear(name: str, compiled: Any, oracle: Any) -> None:
    model, its = compiled(name), oracle(name)
    layers = layers_of(model)
    run = its.run(PROMPTS[3], steps=STEPS, reads=[("resid_post", i) for i in range(its.depth)])
    with model.trace(PROMPTS[3], **KW) as tracer:
        result = tracer.result.save()
        seen = {i: [] for i in range(its.depth)}.save()
        for _ in tracer.iter[:]:
            for i in range(len(layers)):
                seen[i].append(layers[i].resid_post)
    assert result.gears == gears(split=STEPS)
    for i in range(its.depth):
        assert_steps_close(seen[i], run.values["resid_post", i], f"layer {i}")
    assert tokens_of(result) == run.tokens


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", ["in place", "assigned", "output"])
def test_edits_at_taps_are_the_oracles(name: str, way: str, compiled: Any, oracle: Any) -> None:
    model, its = compiled(name), oracle(name)
    layer = layers_of(model)[1]
    push = torch.linspace(-3, 3, its.model.config.hidden_size)
    run = its.run(
        PROMPTS[0], steps=STEPS, reads=[("logits", None)], edits=[Edit("resid_post", 1, lambda rows: rows + push)]
    )
    with model.trace(PROMPTS[0], **KW) as tracer:
        result = tracer.result.save()
        seen = [].save()
        for _ in tracer.iter[:]:
            if way == "in place":
                layer.resid_post[:] += push
            elif way == "assigned":
                layer.resid_post = layer.resid_post + push
            elif isinstance(layer.output, tuple):
                layer.output[0][:] += push
            else:
                layer.output = layer.output + push
            seen.append(model.logits)
    assert result.gears == gears(split=STEPS)
    assert_steps_close(seen, run.values["logits", None], "logits")
    assert tokens_of(result) == run.tokens
    clean = its.run(PROMPTS[0], steps=STEPS, reads=[("logits", None)])
    assert (seen[0] - clean.values["logits", None][0]).abs().max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_tap_runs_eagerly_and_is_right(name: str, compiled: Any, oracle: Any) -> None:
    model, its = compiled(name), oracle(name)
    layers, (norm, attention) = layers_of(model), parts_of(model)
    places = [("norm", 1), ("attention", 1), ("mlp", 1), ("resid_pre", 2)]
    run = its.run(PROMPTS[0], steps=STEPS, reads=places)
    with model.trace(PROMPTS[0], **KW) as tracer:
        result = tracer.result.save()
        seen = {place: [] for place in places}.save()
        for _ in tracer.iter[:]:
            seen["norm", 1].append(first(layers[1].get_submodule(norm).output))
            seen["attention", 1].append(first(layers[1].get_submodule(attention).output))
            seen["mlp", 1].append(first(layers[1].mlp.output))
            seen["resid_pre", 2].append(layers[2].resid_pre)
    assert result.gears == gears(eager=STEPS)
    for place in places:
        assert_steps_close(seen[place], run.values[place], str(place))
    assert tokens_of(result) == run.tokens


def test_the_eager_gear_is_vllms_own_eager_engine_bit_by_bit(compiled: Any, sync_model: Any) -> None:
    """Its kernels are those of an engine that compiles nothing, so its numbers are the same."""
    found = []
    for model in (compiled("tiny-llama"), sync_model("tiny-llama")):
        with model.trace(PROMPTS[3], **KW) as tracer:
            values = [].save()
            for _ in tracer.iter[:]:
                values.append(model.model.layers[1].mlp.output)
                values.append(model.model.norm.output[0])
                values.append(model.logits)
        found.append(values)
    assert len(found[0]) == 3 * STEPS
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_mixed_requests_choose_together(compiled: Any, oracle: Any) -> None:
    """One block in need of a module that is no tap takes its steps, and no others, into the eager gear."""
    model, its = compiled("tiny-llama"), oracle("tiny-llama")
    layers = model.model.layers
    runs = [its.run(prompt, steps=8, reads=[("resid_post", 1), ("mlp", 2), ("logits", None)]) for prompt in PROMPTS]
    many = {**KW, "max_tokens": 8}
    with model.trace() as tracer:
        with tracer.invoke(PROMPTS[0], **many):
            result0 = tracer.result.save()
            stream = [].save()
            for _ in tracer.iter[:]:
                stream.append(layers[1].resid_post)
        with tracer.invoke(PROMPTS[1], **many):
            result1 = tracer.result.save()
            mlps = [].save()
            for step in tracer.iter[:]:
                if step == 3:
                    break
                mlps.append(layers[2].mlp.output)
        with tracer.invoke(PROMPTS[2], **many):
            result2 = tracer.result.save()
            logits = [].save()
            for _ in tracer.iter[:]:
                logits.append(model.logits)
    # The block of the second sees the beginning of its fourth step, and asks for nothing in it.
    assert result1.gears["eager"] == 4
    for result in (result0, result1, result2):
        assert sum(result.gears.values()) == 8
        # The engine may begin one of them a step before another.
        assert 3 <= result.gears["eager"] <= 4
        assert result.gears["split"] >= 2
    assert_steps_close(stream, runs[0].values["resid_post", 1], "the stream")
    assert_steps_close(mlps, runs[1].values["mlp", 2][:3], "the MLP")
    assert_steps_close(logits, runs[2].values["logits", None], "the logits")
    assert [tokens_of(result) for result in (result0, result1, result2)] == [run.tokens for run in runs[:3]]


def test_a_cache_of_taps_keeps_the_gear(compiled: Any, oracle: Any) -> None:
    model, its = compiled("tiny-llama"), oracle("tiny-llama")
    run = its.run(PROMPTS[0], steps=STEPS, reads=[("resid_post", 2)])
    with model.trace(PROMPTS[0], **KW) as tracer:
        result = tracer.result.save()
        kept = tracer.cache().save()
    assert result.gears == gears(split=STEPS)
    assert_steps_close([sum(pair) for pair in kept["model.layers.2"]], run.values["resid_post", 2], "the cache")
    with model.trace(PROMPTS[0], **KW) as tracer:
        result = tracer.result.save()
        kept = tracer.cache("model.layers.*.mlp").save()
    assert result.gears == gears(eager=STEPS)
    assert {len(each) for each in kept.values()} == {STEPS}


def test_errors_are_the_same_in_every_gear(compiled: Any) -> None:

    model = compiled("tiny-llama")
    with pytest.raises(OutOfOrderError), model.trace(PROMPTS[0], **KW):
        a = model.model.layers[2].output
        b = model.model.layers[1].output
    with pytest.raises(OutOfOrderError), model.trace(PROMPTS[0], **KW):
        a = model.logits
        b = model.model.layers[1].output
    with pytest.raises(UnknownModuleError, match="layers"), model.trace(PROMPTS[0], **KW):
        c = model.model.layerz[1].output
    with pytest.raises(ZeroDivisionError), model.trace(PROMPTS[0], **KW):
        h = model.model.layers[1].output[0]
        h / (1 // 0)
    assert tokens_of(model.generate(PROMPTS[0], **KW)[0])


def test_several_sequences_of_one_request_count_together(compiled: Any) -> None:
    model = compiled("tiny-llama")
    with model.trace(PROMPTS[0], **{**KW, "n": 3, "temperature": 1.0, "seed": 1}) as tracer:
        result = tracer.result.save()
        model.model.layers[1].output[0][:] += 0
    # Where one of them begins a step late, the others have a second step in the gear of its first.
    assert sum(result[0].gears.values()) == 3 * STEPS
    assert result[0].gears["split"] >= 3
    assert result[0].gears["eager"] == 0


def test_the_engines_totals_are_those_of_its_steps(compiled: Any) -> None:
    model = compiled("tiny-llama")
    before = model.debug()["gears"]
    model.generate(PROMPTS[0], **KW)
    with model.trace(PROMPTS[0], **KW):
        h = model.model.layers[1].output.save()
    after = model.debug()["gears"]
    assert {name: after[name] - before[name] for name in after} == gears(graph=2 * STEPS - 1, split=1)
    assert len(h) == 2


def test_an_untraced_output_tells_of_no_gears(compiled: Any) -> None:
    (output,) = compiled("tiny-llama").generate(PROMPTS[0], **KW)
    assert output.gears == {}
    assert output.kv_transfer_params is None


# Engines with other taps.

PROGRAM = """
import sys
from endoscope import VLLM

taps, path = eval(sys.argv[1]), sys.argv[2]
with VLLM(path, taps=taps, kv_cache_memory_bytes=1 << 26, max_model_len=512, dtype="float32") as model:
    for site in (model.model.layers[2], model.model.layers[1].mlp):
        with model.trace("The Eiffel Tower", max_tokens=2, temperature=0.0) as tracer:
            result = tracer.result.save()
            rows = [].save()
            for _ in tracer.iter[:]:
                output = site.output
                rows.append(output[0] if isinstance(output, tuple) else output)
        print("RESULT", result.gears, [float(each.double().abs().sum()) for each in rows])
"""


def test_engines_with_other_taps_on_one_compile_cache(tmp_path: Any) -> None:
    """One after the other, they share what they can and never take each other's code."""
    found = {}
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    for taps in ("'auto'", "['model.layers.1.mlp.output']", "'auto'"):
        ran = subprocess.run(
            [sys.executable, str(script), taps, path_of("tiny-llama")],
            env=environment(VLLM_CACHE_ROOT=str(tmp_path / "cache")),
            capture_output=True,
            text=True,
            timeout=300,
        )
        lines = [line for line in ran.stdout.splitlines() if line.startswith("RESULT")]
        assert len(lines) == 2, ran.stderr[-3000:]
        found.setdefault(taps, []).append([eval(line[len("RESULT ") :].replace("} [", "}, [")) for line in lines])
    whole, other = gears(split=2), gears(eager=2)
    assert [got for got, _ in found["'auto'"][0]] == [got for got, _ in found["'auto'"][1]] == [whole, other]
    assert [got for got, _ in found["['model.layers.1.mlp.output']"][0]] == [other, whole]
    values = [[rows for _, rows in runs] for several in found.values() for runs in several]
    for one in values[1:]:
        for rows, right in zip(one, values[0], strict=True):
            assert rows == pytest.approx(right, abs=1e-2, rel=1e-4)


@pytest.mark.parametrize(
    ("taps", "said"),
    [
        (["model.layers.*.mpl.output"], "model.layers.0.mlp.output"),
        (["model.layers.0.input"], "only outputs can be tapped"),
    ],
)
def test_taps_that_fit_nothing_are_refused(taps: list[str], said: str) -> None:
    model = VLLM(path_of("tiny-llama"), taps=taps, **{**options_of("tiny-llama"), "enforce_eager": False})
    with pytest.raises(EngineArgumentError, match=r"taps has") as caught:
        model.start()
    assert said in str(caught.value)


@pytest.mark.parametrize("taps", ["model.layers.*.output", 5, [3]])
def test_taps_that_are_no_patterns_are_refused_at_once(taps: Any) -> None:
    with pytest.raises(EngineArgumentError, match="taps is"):
        VLLM(path_of("tiny-llama"), taps=taps)
