"""A probe that has ended, however it did, leaves nothing behind; and a step in which nobody waits has no wrapper."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import Engine, Request, failing, gpt, llama, plain, run, same

from endoscope.errors import NeverRanError
from endoscope.probing import Span
from endoscope.probing.steps import caches_close


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only reference counts free what is made in the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Forward:
    """One step of an engine under a test's own control."""

    def __init__(self, model: Any) -> None:
        self.engine = Engine(model)
        self.handoffs = self.engine.handoffs

    def begin(self, *probes: Any, samples: bool = True) -> None:
        pairs = [(probe, Span(2 * row, 2 * row + 2, row), samples) for row, probe in enumerate(probes)]
        self.tokens = 2 * max(len(probes), 1)
        self.handoffs.begin(pairs, self.tokens, max(len(probes), 1))

    def forward(self) -> None:
        with torch.inference_mode():
            ids = torch.arange(self.tokens)
            hidden = self.engine.module(ids, ids % 2)
            logits = self.handoffs.visit(self.handoffs.logits, self.engine.module.compute_logits(hidden[1::2]))
            self.handoffs.visit(self.handoffs.samples, logits.argmax(-1, keepdim=True))

    def step(self, *probes: Any) -> None:
        self.begin(*probes)
        self.forward()
        self.handoffs.end()


def waiting(handoffs: Any) -> list[str]:
    """The sites where somebody waits."""
    sites = [handoffs.logits, handoffs.samples, handoffs.next_step]
    for station in handoffs.stations.values():
        sites += [station.inputs, station.output, station.resid_pre, station.resid_post]
    return [site.name for site in sites if site.waiting]


def forwards(model: Any) -> dict[str, Any]:
    """What the modules hold in their own dict under ``forward``."""
    return {path: module.__dict__["forward"] for path, module in model.named_modules() if "forward" in module.__dict__}


# Wrappers.


def test_a_step_in_which_nobody_waits_for_a_module_has_no_wrapper() -> None:
    # contract: F1
    model = llama()
    engine = Engine(model)
    wrapped: list[list[str]] = []
    engine.after_begin = lambda: wrapped.append(engine.wrapped())
    engine.run(Request([1], None, 2))
    assert wrapped == [[], []]
    block = """
        model.model.layers[1].mlp.output
        for step in tracer.iter[1:]:
            model.logits
            if step == 3:
                model.samples
            if step == 4:
                tracer.next()
                model.model.layers[0].output
        """
    engine.run(Request([3, 1], block, 8), Request([4], None, 9))
    # The first step of all notes the order in which the modules run.
    assert set(wrapped[2]) == {path for path, _ in model.named_modules()}
    assert wrapped[3:7] == [[]] * 4
    assert wrapped[7] == ["", "model", "model.layers", "model.layers.0"]
    assert wrapped[8:] == [[]] * 3
    assert forwards(model) == {}


def test_only_what_is_awaited_and_what_it_is_inside_of_is_wrapped() -> None:
    # contract: F1
    model = gpt()
    engine = Engine(model)
    engine.run(Request([1], "model.logits"))
    wrapped: list[list[str]] = []
    engine.after_begin = lambda: wrapped.append(engine.wrapped())
    block = "for step in tracer.iter[:]: model.transformer.h[1].mlp[0].output"
    engine.run(Request([3, 1], block, 2), Request([3, 1], None, 4))
    path = ["", "transformer", "transformer.h", "transformer.h.1", "transformer.h.1.mlp", "transformer.h.1.mlp.0"]
    assert wrapped == [path, path, [], []]


def test_a_forward_of_a_module_of_its_own_is_put_back() -> None:
    # contract: F1
    model = gpt()
    module = model.transformer.h[1].mlp
    calls: list[int] = []

    def own(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return type(module).forward(module, hidden) * 2

    module.forward = own
    before = forwards(model)
    engine = Engine(model)
    saves = engine.run(Request([3, 1], "value = model.transformer.h[1].mlp.output.save()"))
    engine.run(Request([3, 1], None))
    assert forwards(model) == before == {"transformer.h.1.mlp": own}
    with torch.inference_mode():
        layer = model.transformer.h[1]
        hidden = model.transformer.h[0](
            model.transformer.wte(torch.tensor([3, 1])) + model.transformer.wpe(torch.arange(2))
        )
        assert same(saves["value"], own(layer.ln_2(layer.attn(layer.ln_1(hidden)) + hidden)))


def test_untraced_steps_give_the_same_bits_as_no_engine_at_all() -> None:
    # contract: F1
    model = gpt()
    request = Request([3, 1, 4], None, 3)
    Engine(model).run(request, Request([5], "model.logits", 5))
    expected = plain(model, [3, 1, 4], 3)
    assert request.generated == expected.generated
    assert same(request.logits, [row[0] for row in expected.logits])


# Ends.

ENDS = {
    "at the end": "x = 1",
    "at a module": "model.model.layers[1].output\nmodel.model.layers[0].output",
    "at the logits": "model.logits\nmodel.logits\nmodel.samples\nmodel.logits",
    "in a loop": "for step in tracer.iter[:]: model.model.layers[1].mlp.output.add_(1)",
    "waiting for a step": "tracer.next()",
    "stopped": "tracer.stop()",
    "failed": "held = model.model.layers[1].output\n1 / 0",
    "failed in a helper": (
        "def f(x):\n    y = x[0] * 2\n    mine.append(y)\nheld = 1\ndef g(x):\n    try: f(x)\n"
        "    except Exception: 1 / 0\ng(model.model.layers[1].output)"
    ),
    "replaced wrongly": "model.model.layers[1].output = 1",
    "with a cache": "cache = tracer.cache()\ntracer.cache('model.layers.0.mlp')\nfor step in tracer.iter[:]: pass",
    "in a generator": "def f():\n    for step in tracer.iter[:]:\n        yield model.logits\nheld = [x for x in f()]",
    "in a with": "with torch.no_grad():\n    for step in tracer.iter[:]: held = model.logits",
    "in a finally": "try:\n    tracer.next()\nfinally:\n    held = 1",
    "catching": "while True:\n    try:\n        model.logits\n        tracer.next()\n    except Exception: break",
    "catching everything": "for i in range(9):\n    try: model.model.norm.output\n    except BaseException: held = 1",
    "printing": "print('x', end=''); print(model.logits)",
}


@pytest.mark.parametrize("how", ["finish", "kill", "kill in the middle"])
@pytest.mark.parametrize("name", ENDS)
def test_nothing_is_left_of_a_block(name: str, how: str, no_collector: None) -> None:
    # contract: A9
    model = llama()
    one = Forward(model)
    block = """
big = torch.zeros(100)
first = model.model.embed_tokens.output
first.save()
held.extend([ref(big), ref(first)])
"""
    outside = torch.ones(3)
    held: list[Any] = []
    values = {"mine": outside, "held": held, "ref": weakref.ref}
    other = one.engine.probe("for step in tracer.iter[:]: model.logits")
    probe = one.engine.probe(block + ENDS[name].replace("held", "mine"), lambda *line: None, **values)
    one.step(probe, other)
    if how == "kill in the middle":
        one.begin(probe, other)
        probe.kill()
        caches_close(probe)
        probe.clear()
        one.forward()
        one.handoffs.end()
    else:
        one.step(probe, other)
        getattr(probe, how)()
        caches_close(probe)
        probe.clear()
    assert probe.dead
    assert probe.site is None
    assert len(held) == 2
    assert waiting(one.handoffs) == ["the next step"]
    assert all(not station.caches for station in one.handoffs.stations.values())
    assert [reference() for reference in held] == [None] * len(held)
    gone = weakref.ref(probe)
    mine = weakref.ref(outside)
    values.clear()
    del probe, outside
    one.step(other)
    other.kill()
    one.begin()
    assert gone() is None
    assert mine() is None
    assert waiting(one.handoffs) == []
    assert forwards(model) == {}
    one.handoffs.end()
    assert list(one.handoffs.probes) == []


@pytest.mark.parametrize("name", ENDS)
def test_an_engine_serves_on_after_a_block(name: str) -> None:
    # contract: D1
    model = llama()
    engine = Engine(model)
    other = Request([7, 7], "seen = [int(model.samples) for step in tracer.iter[:]].save()", 4)
    ended = Request([3, 1], ENDS[name], 3)
    engine.run(ended, other, check=False)
    assert ended.probe.dead
    assert other.saves["seen"] == plain(model, [7, 7], 4).generated
    after = engine.run(Request([3, 1], "logits = model.logits.save()"))
    assert same(after["logits"], plain(model, [3, 1]).logits[0])


@pytest.mark.parametrize("how", ["finish", "kill"])
def test_a_block_that_never_began(how: str) -> None:
    # contract: A9
    engine = Engine(llama())
    ran: list[int] = []
    probe = engine.probe("ran.append(1)", ran=ran)
    getattr(probe, how)()
    assert probe.dead
    assert ran == []
    if how == "finish":
        assert isinstance(probe.error, NeverRanError)
    else:
        assert probe.error is None
    getattr(probe, how)()
    probe.kill()


def test_an_error_that_a_block_had_before_it_began_is_kept() -> None:
    # contract: D1
    probe = Engine(llama()).probe("x = 1")
    probe.error = ValueError("could not be loaded")
    probe.kill()
    assert str(probe.error) == "could not be loaded"
    assert probe.dead


def test_an_error_thrown_into_a_block_that_never_began() -> None:
    # contract: D1
    probe = Engine(llama()).probe("x = 1")
    probe.fail(KeyError("x"))
    assert probe.dead
    assert isinstance(probe.error, KeyError)


def test_finally_clauses_run_when_a_block_is_killed() -> None:
    # contract: A9
    one = Forward(llama())
    seen: list[str] = []
    probe = one.engine.probe(
        """
        try:
            with torch.no_grad():
                model.model.layers[0].output
                model.logits
                tracer.next()
        except Exception:
            seen.append("except")
        finally:
            seen.append("finally")
        seen.append("after")
        """,
        seen=seen,
    )
    one.step(probe)
    probe.kill()
    assert seen == ["finally"]
    assert probe.error is None


@pytest.mark.parametrize("how", ["finish", "kill"])
def test_a_block_that_goes_on_asking_is_ended(how: str) -> None:
    # contract: A9
    one = Forward(llama())
    seen: list[str] = []
    probe = one.engine.probe(
        """
        for attempt in range(5):
            try:
                for step in tracer.iter[:]: pass
                model.model.layers[0].output
            except BaseException as error:
                seen.append(type(error).__name__)
        """,
        seen=seen,
    )
    one.step(probe)
    getattr(probe, how)()
    assert probe.dead
    first = ["GreenletExit"] if how == "kill" else ["NeverRanError"]
    assert seen == first + ["NeverRanError"] * 4
    assert waiting(one.handoffs) == []


def test_a_finally_that_asks_for_a_site_when_it_is_killed() -> None:
    # contract: A9
    one = Forward(llama())
    probe = one.engine.probe("try:\n    tracer.next()\nfinally:\n    model.logits")
    one.step(probe)
    probe.kill()
    assert probe.dead
    assert isinstance(probe.error, NeverRanError)
    assert waiting(one.handoffs) == []


def test_the_code_after_a_loop_runs_when_the_request_ends() -> None:
    # contract: C5
    saves = run(
        llama(),
        """
        total = 0
        try:
            for step in tracer.iter[:]:
                total += int(model.samples)
        finally:
            mean = total / (step + 1)
        mean.save()
        """,
        tokens=4,
    )
    assert saves == {"mean": sum(plain(llama(), [3, 1, 4], 4).generated) / 4}


def test_an_exit_of_the_interpreter_is_the_blocks_error() -> None:
    # contract: D1
    for code in ("raise SystemExit(3)", "import sys\nsys.exit()", "raise KeyboardInterrupt", "raise GeneratorExit"):
        assert not isinstance(failing(llama(), code), Exception)


def test_a_block_that_recurses_without_end() -> None:
    # contract: D1
    assert isinstance(failing(llama(), "def f(): return f()\nmodel.logits\nf()"), RecursionError)
    assert isinstance(failing(llama(), "f = lambda: 1 + f()\nf()"), RecursionError)


# Prints and warnings.


def test_prints_and_warnings_go_home() -> None:
    # contract: D4
    out, err, show = sys.stdout, sys.stderr, warnings.showwarning
    inside: list[Any] = []
    request = Request(
        [3, 1],
        """
        import sys, warnings
        warnings.simplefilter("always")
        print("one", 2, end=" ")
        model.logits
        print("three\\nfour\\nfi", end="")
        print("oops", file=sys.stderr)
        warnings.warn("careful", UserWarning)
        sys.stdout.writelines(["ve\\n", "six"])
        inside.append((sys.stdout.isatty(), sys.stdout.writable(), sys.stdout.encoding))
        """,
        2,
        values={"inside": inside},
    )
    with warnings.catch_warnings():
        Engine(llama()).run(request)
    for lines in request.probe.lines.values():
        lines.close()
        lines.close()
    prints = [content for stream, content in request.printed if stream == "stdout"]
    assert prints == ["one 2 three\nfour", "five", "six"]
    assert [content for stream, content in request.printed if stream == "stderr"] == ["oops"]
    (warning,) = [content for stream, content in request.printed if stream == "warning"]
    assert warning == ("careful", UserWarning, "block.py", 7)
    assert inside == [(False, True, "utf-8")]
    assert (sys.stdout, sys.stderr, warnings.showwarning) == (out, err, show)


@pytest.mark.parametrize("name", ENDS)
def test_stdout_is_restored_however_a_block_ends(name: str) -> None:
    # contract: D4
    out, err, show = sys.stdout, sys.stderr, warnings.showwarning
    request = Request([3, 1], "import sys\nsys.stdout = None\n" + ENDS[name], 2)
    Engine(llama()).run(request, check=False)
    assert (sys.stdout, sys.stderr, warnings.showwarning) == (out, err, show)


def test_prints_of_two_blocks_do_not_mix() -> None:
    # contract: D4
    block = "for step in tracer.iter[:]:\n    print(name, step, end='')\n    model.logits\n    print('.')"
    first, second = (Request([3], block, 3, values={"name": name}) for name in "ab")
    Engine(llama()).run(first, second)
    assert first.printed == [("stdout", f"a {step}.") for step in range(3)]
    assert second.printed == [("stdout", f"b {step}.") for step in range(3)]


def test_a_handler_of_logging_prints_for_the_block_that_has_the_turn() -> None:
    # contract: D4
    block = """
        import logging
        logger = logging.getLogger(name)
        logger.addHandler(handlers.setdefault(0, logging.StreamHandler(__import__("sys").stdout)))
        model.logits
        logger.error(name)
        """
    handlers: dict[int, Any] = {}
    requests = [Request([3], block, values={"name": name, "handlers": handlers}) for name in ("one", "two")]
    Engine(llama()).run(*requests)
    assert [request.printed for request in requests] == [[("stdout", "one")], [("stdout", "two")]]


def test_a_block_writes_bytes_to_its_output() -> None:
    # contract: D4
    request = Request([3], "import sys\nsys.stdout.buffer.write('é\\n'.encode())\nsys.stdout.flush()")
    Engine(llama()).run(request)
    assert request.printed == [("stdout", "é")]


def test_a_filter_of_warnings_stays_in_its_block() -> None:
    # contract: D4
    block = """
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            model.model.layers[0].output
            warnings.warn("from a block")
            model.logits
        """
    before = list(warnings.filters)
    with warnings.catch_warnings():
        shown, hidden = (
            Request([3], block, values={"action": "always"}),
            Request([3], block, values={"action": "ignore"}),
        )
        again = Request([3], block, values={"action": "always"})
        engine = Engine(llama())
        seen: list[Any] = []
        engine.after_begin = lambda: seen.append(list(warnings.filters))
        engine.run(shown, hidden, again)
        assert seen == [before]
        assert warnings.filters == before
    assert [content[0] for _, content in shown.printed] == ["from a block"]
    assert hidden.printed == []
    assert [content[0] for _, content in again.printed] == ["from a block"]


def test_the_stack_of_a_block_is_deeper_than_torch_looks() -> None:  # contract: D1
    # What lies behind a greenlet's first frame is not to be read as frames.
    block = """
import ctypes
libc = ctypes.CDLL(None)
taken = (ctypes.c_void_p * 65)()
first = libc.backtrace(taken, 65).save()
model.model.layers[2].mlp.output
second = libc.backtrace(taken, 65).save()
model.logits
third = libc.backtrace(taken, 65).save()
"""
    saves = run(llama(), block)
    assert (saves["first"], saves["second"], saves["third"]) == (65, 65, 65)
