"""What a block may take, and what happens to one that takes more."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from harness import Engine, Request, line_of, llama, plain, same

from endoscope.errors import BlockError, EngineArgumentError, SaveLimitError, StepTimeoutError, UsageError
from endoscope.probing.exits import refuse_exits
from endoscope.probing.limits import Held, Limits
from endoscope.probing.saves import Kept
from endoscope.probing.watchdog import Watchdog

READS = "rows = [].save()\nfor _ in tracer.iter[:]:\n    rows.append(model.model.layers[1].output[0])"


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def engine(model: Any, **limits: Any) -> tuple[Engine, Watchdog]:
    """An engine whose blocks are watched."""
    made = Engine(model)
    made.handoffs.limits = Limits.given(**limits)
    watchdog = Watchdog(made.handoffs.limits)
    watchdog.watch()
    return made, watchdog


ENDLESS = {
    "a loop": "while True:\n    pass  # here",
    "a loop with calls": "import math\nwhile True:\n    math.sqrt(2)  # here",
    "a sleep": "import time\ntime.sleep(100)  # here",
    "a lock": "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()  # here",
    "a site again and again": "while True:\n    model.model.layers[0].output  # here",
    "in a function": "def f():\n    while True:\n        pass  # here\nf()",
    "in a comprehension": "import itertools\n[0 for _ in itertools.count()  # here\n if False]",
}


# contract: D5
@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("before", ["", "model.model.layers[1].output\n", "for _ in tracer.iter[1:2]: model.logits\n"])
def test_a_block_that_never_returns_is_interrupted(model: Any, name: str, before: str) -> None:
    block = "kept = torch.ones(2).save()\n" + before + ENDLESS[name]
    if "layers[1]" in before or "iter" in before:
        block = block.replace("layers[0]", "layers[2]")
    if "iter" in before:
        block = block.replace("model.model.layers[2].output", "model.samples")
    endless = Request([3, 1], block, 3)
    before_it, behind_it = Request([2, 7], READS, 3), Request([5], READS, 3)
    host, _ = engine(model, step_timeout=0.3)
    host.run(before_it, endless, behind_it, check=False)
    assert isinstance(endless.error, StepTimeoutError)
    assert isinstance(endless.error, TimeoutError)
    assert "step_timeout" in str(endless.error)
    # The line of the loop or of what is in it.
    here = next(n for n, line in enumerate(block.split("\n"), 1) if "# here" in line)
    assert line_of(endless.error) in (here - 1, here, here + 1)
    assert torch.equal(endless.saves["kept"], torch.ones(2))
    for request in (before_it, behind_it):
        expected = plain(model, request.prompt, 3, ("model.layers.1",))
        assert request.error is None
        for step, row in enumerate(request.saves["rows"]):
            assert same(row, expected.seen[step, "model.layers.1", "output"][0])


# contract: D5
@pytest.mark.parametrize(
    "block",
    [
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
        "import time\nwhile True:\n    try:\n        time.sleep(9)\n    except:\n        continue",
        "def f():\n    try:\n        while True: pass\n    except BaseException:\n        f()\nwhile True:\n    f()",
    ],
)
def test_a_block_that_catches_the_interruption_ends_all_the_same(model: Any, block: str) -> None:
    endless, other = Request([3, 1], block, 2), Request([5], READS, 2)
    host, _ = engine(model, step_timeout=0.2)
    host.run(endless, other, check=False)
    assert isinstance(endless.error, BlockError)
    assert len(other.saves["rows"]) == 2
    assert endless.probe.dead


# contract: D5
def test_a_block_that_is_interrupted_may_go_on(model: Any) -> None:
    block = """
        try:
            while True:
                pass
        except TimeoutError as error:
            text = str(error).save()
        logits = model.logits.save()
        """
    request = Request([3, 1], block)
    host, _ = engine(model, step_timeout=0.2)
    host.run(request)
    assert "step_timeout" in request.saves["text"]
    assert same(request.saves["logits"], plain(model, [3, 1], 1).logits[0])


# contract: D5
def test_many_short_turns_are_not_one_long_one(model: Any) -> None:
    block = """
        import time
        for _ in tracer.iter[:]:
            for layer in model.model.layers:
                layer.output
                time.sleep(0.1)
        """
    request = Request([3, 1], block, 4)
    host, _ = engine(model, step_timeout=0.4)
    start = time.monotonic()
    host.run(request)
    assert time.monotonic() - start > 1


def test_the_watchdog_rests_when_there_is_nobody_to_watch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("endoscope.probing.watchdog.IDLE", 0.3)

    def names() -> int:
        return [thread.name for thread in threading.enumerate()].count("endoscope watchdog")

    deadline = time.monotonic() + 20
    while names() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert names() == 0
    host, watchdog = engine(model, step_timeout=0.2)
    watchdog.watch()
    assert names() == 1
    while names() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert names() == 0
    watchdog.watch()
    endless = Request([3], "while True: pass")
    host.run(endless, check=False)
    assert isinstance(endless.error, StepTimeoutError)


def test_a_signal_that_nobody_sent_is_nothing(model: Any) -> None:
    request = Request(
        [3, 1], "import signal\nsignal.pthread_kill(__import__('threading').get_ident(), signal.SIGURG)\nx = 1 .save()"
    )
    host, _ = engine(model)
    host.run(request)
    assert request.saves == {"x": 1}


# What a block keeps.

STEPS = "for _ in tracer.iter[:]:  # here\n    model.logits\n"
GROWS = {
    "one tensor": "torch.zeros(1 << 20).save()  # here",
    "a list": f"rows = [].save()\n{STEPS}    rows.append(torch.zeros(1 << 18))",
    "nested": f"rows = {{}}.save()\nrows[0] = []\n{STEPS}    rows[0].append([torch.zeros(1 << 18)])",
    "bytes": "data = bytes(1 << 21).save()  # here",
    "an array": "import numpy\narray = numpy.zeros(1 << 18).save()  # here",
    "at the end": (
        "rows = [].save()\nfor _ in tracer.iter[:]: model.logits\nrows.append(torch.zeros(1 << 20))\n"
        "rows.save()  # here"
    ),
}


# contract: D5
@pytest.mark.parametrize("name", GROWS)
def test_a_block_that_keeps_too_much_is_told_how_much(model: Any, name: str) -> None:
    block = "small = torch.ones(2).save()\n" + GROWS[name]
    greedy, other = Request([3, 1], block, 4), Request([5], READS, 4)
    host, _ = engine(model, save_limit=1_500_000)
    host.run(greedy, other, check=False)
    assert isinstance(greedy.error, SaveLimitError)
    assert isinstance(greedy.error, MemoryError)
    assert "save_limit=1500000" in str(greedy.error)
    assert "2.1 MB" in str(greedy.error) or "4.2 MB" in str(greedy.error)
    assert line_of(greedy.error) == next(n for n, line in enumerate(block.split("\n"), 1) if "# here" in line)
    assert list(greedy.saves) == ["small"]
    assert len(other.saves["rows"]) == 4


# contract: D5
def test_saves_that_run_away_within_one_turn_are_stopped(model: Any) -> None:
    block = "rows = [].save()\nwhile True:\n    rows.append(torch.zeros(1 << 12))"
    greedy = Request([3, 1], block, 4)
    host, _ = engine(model, save_limit=5_000_000)
    host.run(greedy, check=False)
    assert isinstance(greedy.error, SaveLimitError)


# contract: D5
def test_a_cache_counts_too(model: Any) -> None:
    one = Request([3, 1, 4], "found = tracer.cache('model.layers.1.mlp')\nfor _ in tracer.iter[:]: pass", 6)
    host, _ = engine(model, save_limit=3 * 64 + 4 * 64)
    host.run(one, check=False)
    assert isinstance(one.error, SaveLimitError)
    two = Request([3, 1, 4], "found = tracer.cache('model.layers.1.mlp')\nfor _ in tracer.iter[:]: pass", 6)
    host, _ = engine(model, save_limit=3 * 64 + 5 * 64)
    host.run(two)
    assert len(two.saves["found"]["model.layers.1.mlp"]) == 6


def test_what_was_let_go_of_does_not_count() -> None:
    held = Held()
    rows: list[torch.Tensor] = []
    kept = [Kept("rows", rows), Kept("again", rows)]
    for _ in range(10):
        rows.append(torch.zeros(100))
        rows[:-1] = [row[:0] for row in rows[:-1]]
        assert not held.grown(kept, 1000)
    rows.extend(torch.zeros(100) for _ in range(2))
    assert held.grown(kept, 1000)
    assert held.total == 1200


def test_one_tensor_that_is_kept_often_counts_once() -> None:
    held, tensor = Held(), torch.zeros(100)
    assert not held.grown([Kept(str(n), tensor) for n in range(20)], 500)


# contract: D5
@pytest.mark.parametrize("value", [0, -1, "much", True, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["step_timeout", "save_limit"])
def test_a_limit_is_a_positive_number(name: str, value: Any) -> None:
    with pytest.raises(EngineArgumentError, match=f"{name} takes a positive number"):
        Limits.given(**{name: value})


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDOSCOPE_STEP_TIMEOUT", "2.5")
    assert Limits.given() == Limits(2.5, 2 << 30)
    with Limits(7.0, 12).in_environment():
        assert Limits.given() == Limits(7.0, 12)
        assert Limits.given(step_timeout=1) == Limits(1.0, 12)
    assert Limits.given() == Limits(2.5, 2 << 30)
    monkeypatch.setenv("ENDOSCOPE_SAVE_LIMIT", "lots")
    with pytest.raises(EngineArgumentError, match="ENDOSCOPE_SAVE_LIMIT"):
        Limits.given()


# What would end the process.

EXITS = [
    "import os\nos._exit(3)",
    "from os import _exit\n_exit(3)",
    "import posix\nposix._exit(3)",
    "import os\nos.abort()",
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "import os, signal\nos.killpg(os.getpgrp(), signal.SIGKILL)",
    "import os, signal\nos.kill(0, signal.SIGKILL)",
    "import signal\nsignal.raise_signal(signal.SIGKILL)",
    "import os\nos.execv('/bin/true', ['true'])",
    "import os\nos.execlp('true', 'true')",
    "import os\nos.fork()",
    "exit_()",
]


@pytest.fixture
def _exits() -> None:
    refuse_exits()
    refuse_exits()


# contract: D5
@pytest.mark.usefixtures("_exits")
@pytest.mark.parametrize("block", EXITS)
def test_a_block_cannot_end_the_process(model: Any, block: str) -> None:
    ends, other = (
        Request([3, 1], "model.model.layers[0].output\n" + block, 2, values={"exit_": os._exit}),
        Request([5], READS, 2),
    )
    Engine(model).run(ends, other, check=False)
    assert isinstance(ends.error, UsageError)
    assert "was called in a block" in str(ends.error)
    assert len(other.saves["rows"]) == 2


@pytest.mark.usefixtures("_exits")
def test_everybody_else_can(model: Any) -> None:
    child = os.fork()
    if not child:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    block = """
        import subprocess, sys
        found = subprocess.run([sys.executable, "-c", "import os; os._exit(5)"]).returncode.save()
        """
    request = Request([3], block)
    Engine(model).run(request)
    assert request.saves == {"found": 5}
    caught: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    try:
        signal.raise_signal(signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught == [signal.SIGUSR1] * 2
