"""Every gear on a GPU, with vLLM's graphs, compiled code and asynchronous scheduling, against the float32 oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

STEPS = 6
KW: dict[str, Any] = {"max_tokens": STEPS, "temperature": 0.0, "ignore_eos": True}
PROMPT = [5, 6, 7, 8, 9, 10]
TOLERANCE = 5e-3
"""Triton's attention multiplies float32 as TF32, whose rounding is 5e-4 of a value; another site or row makes 1e-1."""


def close(found: list[Any], right: list[Any]) -> None:
    """Every step's rows agree."""
    assert len(found) == len(right)
    for one, other in zip(found, right, strict=True):
        assert one.device.type == "cpu"
        assert one.shape == other.shape
        assert ((one - other).norm(dim=-1) / other.norm(dim=-1)).max() < TOLERANCE


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_reads_in_every_gear(model: Any, its: Any) -> None:
    places = [("resid_post", 0), ("resid_post", 3), ("mlp", 1), ("attention", 2), ("logits", None)]
    run = its.run(PROMPT, STEPS, places)
    with model.trace(PROMPT, **KW) as tracer:
        result = tracer.result.save()
        logits = [].save()
        for _ in tracer.iter[:]:
            logits.append(model.logits)
    assert result.gears == {"graph": STEPS, "split": 0, "eager": 0}
    close(logits, run["logits", None])
    assert tokens(result) == run.tokens
    with model.trace(PROMPT, **KW) as tracer:
        result = tracer.result.save()
        first, last = [].save(), [].save()
        for _ in tracer.iter[:]:
            first.append(model.model.layers[0].resid_post)
            last.append(model.model.layers[3].resid_post)
    assert result.gears == {"graph": 0, "split": STEPS, "eager": 0}
    close(first, run["resid_post", 0])
    close(last, run["resid_post", 3])
    assert tokens(result) == run.tokens
    with model.trace(PROMPT, **KW) as tracer:
        result = tracer.result.save()
        mlp, attention = [].save(), [].save()
        for _ in tracer.iter[:]:
            mlp.append(model.model.layers[1].mlp.output)
            attention.append(model.model.layers[2].self_attn.output)
    assert result.gears == {"graph": 0, "split": 0, "eager": STEPS}
    close(mlp, run["mlp", 1])
    close(attention, run["attention", 2])
    assert tokens(result) == run.tokens


@pytest.mark.parametrize("way", ["in place", "assigned"])
def test_edits(model: Any, its: Any, way: str) -> None:
    from oracle import Edit

    push = torch.linspace(-3, 3, 256)
    run = its.run(PROMPT, STEPS, [("logits", None)], [Edit("resid_post", 1, lambda rows: rows + push)])
    with model.trace(PROMPT, **KW) as tracer:
        result = tracer.result.save()
        logits = [].save()
        vector = push.cuda()
        for _ in tracer.iter[:]:
            if way == "in place":
                model.model.layers[1].output[0][:] += vector
            else:
                model.model.layers[1].resid_post = model.model.layers[1].resid_post + vector
            logits.append(model.logits)
    assert result.gears["split"] == STEPS
    close(logits, run["logits", None])
    assert tokens(result) == run.tokens
    assert tokens(result) != its.run(PROMPT, STEPS).tokens


def test_a_skipped_module(model: Any, its: Any) -> None:
    from oracle import Edit

    run = its.run(PROMPT, STEPS, [], [Edit("mlp", 2, torch.zeros_like)])
    with model.trace(PROMPT, **KW) as tracer:
        result = tracer.result.save()
        for _ in tracer.iter[:]:
            model.model.layers[2].mlp.skip(torch.zeros_like(model.model.layers[2].mlp.input))
    assert tokens(result) == run.tokens


@pytest.mark.parametrize("with_eager", [False, True])
def test_32_requests_that_come_and_go(model: Any, its: Any, with_eager: bool) -> None:
    """Blocks of each kind beside untraced requests, of different lengths, so that the batch shrinks step by step."""
    from oracle import Edit

    chance = random.Random(with_eager)
    plans = [
        ([chance.randrange(2, 512) for _ in range(chance.randint(1, 40))], chance.randint(1, 12)) for _ in range(32)
    ]
    push = torch.linspace(-2, 2, 256)
    with model.trace(temperature=0.0, ignore_eos=True) as tracer:
        for number, (prompt, count) in enumerate(plans):
            kind = number % 4
            if kind == 0:
                with tracer.invoke(prompt, max_tokens=count):
                    rows = [].save()
                    for _ in tracer.iter[:]:
                        rows.append(model.model.layers[2].resid_post)
            elif kind == 1:
                with tracer.invoke(prompt, max_tokens=count):
                    vector = push.cuda()
                    for _ in tracer.iter[:]:
                        model.model.layers[1].output[0][:] += vector
            elif kind == 2 and with_eager:
                with tracer.invoke(prompt, max_tokens=count):
                    inner = [].save()
                    for _ in tracer.iter[:]:
                        inner.append(model.model.layers[0].mlp.output)
            else:
                with tracer.invoke(prompt, max_tokens=count):
                    pass
    kept, kept_inner = iter(rows), iter(inner if with_eager else [])
    for number, ((prompt, count), output) in enumerate(zip(plans, tracer.result, strict=True)):
        edits = [Edit("resid_post", 1, lambda rows: rows + push)] if number % 4 == 1 else []
        run = its.run(prompt, count, [("resid_post", 2), ("mlp", 0)], edits)
        assert tokens(output) == run.tokens, number
        if number % 4 == 0:
            close(next(kept), run["resid_post", 2])
        if number % 4 == 2 and with_eager:
            close(next(kept_inner), run["mlp", 0])


def test_tokens_and_logits_that_are_written_while_the_next_step_is_scheduled(model: Any) -> None:
    with model.trace(PROMPT, **KW) as tracer:
        result = tracer.result.save()
        for step in tracer.iter[:]:
            model.samples = torch.full_like(model.samples, 100 + step)
    assert tokens(result) == [100 + step for step in range(STEPS)]
    assert result.gears == {"graph": STEPS, "split": 0, "eager": 0}
    with model.trace(PROMPT, **KW) as tracer:
        result = tracer.result.save()
        for step in tracer.iter[:]:
            model.logits[:, 200 + step] = 1e4
    assert tokens(result) == [200 + step for step in range(STEPS)]


def test_what_is_forced_is_what_the_next_step_reads(model: Any, its: Any) -> None:
    run = its.run(PROMPT, STEPS, [("resid_post", 3)], forced={1: 77, 3: 88})
    with model.trace(PROMPT, **KW) as tracer:
        result = tracer.result.save()
        rows = [].save()
        for step in tracer.iter[:]:
            rows.append(model.model.layers[3].resid_post)
            if step in (1, 3):
                model.samples = torch.full_like(model.samples, 77 if step == 1 else 88)
    assert tokens(result) == run.tokens
    close(rows, run["resid_post", 3])


@pytest.mark.parametrize("at", [0, 1, 4])
def test_stop(model: Any, its: Any, at: int) -> None:
    with model.trace(PROMPT, **{**KW, "max_tokens": 100}) as tracer:
        result = tracer.result.save()
        for step in tracer.iter[:]:
            if step == at:
                tracer.stop()
    assert tokens(result) == its.run(PROMPT, STEPS).tokens[:at]


def test_a_token_that_ends_a_request(model: Any, its: Any) -> None:
    """A step that runs ahead of it is none of the block's."""
    run = its.run(PROMPT, STEPS)
    with model.trace(PROMPT, max_tokens=50, temperature=0.0, stop_token_ids=[run.tokens[3]]) as tracer:
        result = tracer.result.save()
        seen = [].save()
        for step in tracer.iter[:]:
            seen.append(int(model.samples))
    count = run.tokens.index(run.tokens[3]) + 1
    assert tokens(result) == seen == run.tokens[:count]


def test_prompts_in_parts_and_from_the_cache(model: Any, its: Any) -> None:
    """An untraced prompt is longer than a step's budget; a traced one is seen whole, though the cache knows it."""
    chance = random.Random(7)
    long = [chance.randrange(2, 512) for _ in range(600)]
    whole = [chance.randrange(2, 512) for _ in range(200)]
    for _ in range(2):
        outputs = model.generate([long, whole], **KW)
        assert [tokens(output) for output in outputs] == [its.run(long, STEPS).tokens, its.run(whole, STEPS).tokens]
        with model.trace(whole, **KW) as tracer:
            rows = [].save()
            for _ in tracer.iter[:]:
                rows.append(model.model.layers[1].resid_post)
        close(rows, its.run(whole, STEPS, [("resid_post", 1)])["resid_post", 1])


def test_a_blocks_error_ends_its_request_alone(model: Any, its: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        with model.trace(**KW) as tracer:
            with tracer.invoke(PROMPT):
                h = model.model.layers[1].output[0]
                h / (1 // 0)
            with tracer.invoke(PROMPT):
                rows = model.model.layers[1].resid_post.save()
    assert tokens(model.generate(PROMPT, **KW)[0]) == its.run(PROMPT, STEPS).tokens
