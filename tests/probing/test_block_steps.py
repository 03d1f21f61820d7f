"""Loops over the steps of a generation, stopping, and what runs when a request ends."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Engine, Request, failing, line_of, llama, plain, run, same

from endoscope.errors import NeverRanError, OutOfOrderError, UnsupportedError, UsageError


def steps(loop: str, tokens: int = 6, before: str = "") -> Any:
    """The steps that a loop passes through, with the tokens that it sees there."""
    saves = run(
        llama(),
        f"""
        seen = [].save()
        {before or "pass"}
        for step in {loop}:
            seen.append((step, int(model.samples)))
        after = True
        after.save()
        """,
        tokens=tokens,
    )
    assert saves["after"] is True
    generated = plain(llama(), [3, 1, 4], tokens).generated
    for step, token in saves["seen"]:
        assert token == generated[step]
    return [step for step, _ in saves["seen"]]


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("tracer.iter[:]", [0, 1, 2, 3, 4, 5]),
        ("tracer.iter", [0, 1, 2, 3, 4, 5]),
        ("tracer.all()", [0, 1, 2, 3, 4, 5]),
        ("tracer.iter[2:]", [2, 3, 4, 5]),
        ("tracer.iter[:2]", [0, 1]),
        ("tracer.iter[1:4]", [1, 2, 3]),
        ("tracer.iter[::2]", [0, 2, 4]),
        ("tracer.iter[1:6:3]", [1, 4]),
        ("tracer.iter[3]", [3]),
        ("tracer.iter[0]", [0]),
        ("tracer.iter[[0, 2, 5]]", [0, 2, 5]),
        ("tracer.iter[range(1, 3)]", [1, 2]),
        ("tracer.iter[4:2]", []),
        ("tracer.iter[0:0]", []),
        ("tracer.iter[()]", []),
    ],
)
def test_one_pass_a_chosen_step(loop: str, expected: list[int]) -> None:
    # contract: C5
    assert steps(loop) == expected


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        ("tracer.iter[:100]", [0, 1, 2]),
        ("tracer.iter[2:100]", [2]),
        ("tracer.iter[7:]", []),
        ("tracer.iter[7]", []),
        ("tracer.iter[[1, 9]]", [1]),
        ("tracer.iter[::2]", [0, 2]),
    ],
)
def test_case_10_a_loop_that_outruns_the_request_ends_there(loop: str, expected: list[int]) -> None:
    # contract: C5
    assert steps(loop, tokens=3) == expected


@pytest.mark.parametrize(
    "index", ["-1", "-2:", ":-1", "0:4:-1", "0:4:0", "1.5", "'a'", "None", "True", "[0, -1]", "'a':", "0:2.5", "[1.5]"]
)
def test_a_step_that_cannot_be(index: str) -> None:
    # contract: C5
    error = failing(llama(), f"x = 1\nfor step in tracer.iter[{index}]:\n    x = 2", tokens=3)
    assert isinstance(error, ValueError)
    assert "tracer.iter" in str(error)
    assert line_of(error) == 2


def test_steps_that_have_gone_by() -> None:
    # contract: C5
    assert steps("tracer.iter[:]", before="tracer.next(); tracer.next()") == [2, 3, 4, 5]
    assert steps("tracer.iter[0:4]", before="tracer.next()") == [1, 2, 3]
    error = failing(llama(), "tracer.next()\nfor step in tracer.iter[0]:\n    x = 1", tokens=3)
    assert isinstance(error, OutOfOrderError)
    assert "asked for step 0, but the block is already in step 1" in str(error)
    assert line_of(error) == 2


def test_two_loops_one_after_the_other() -> None:
    # contract: C5
    saves = run(
        llama(),
        """
        first, second, third = [].save(), [].save(), [].save()
        for step in tracer.iter[0:2]:
            first.append(step)
        for step in tracer.iter[2:4]:
            second.append((step, int(model.samples)))
        for step in tracer.iter[:]:
            third.append(step)
        for step in tracer.iter[:]:
            third.append("never")
        """,
        tokens=6,
    )
    generated = plain(llama(), [3, 1, 4], 6).generated
    assert saves["first"] == [0, 1]
    assert saves["second"] == [(2, generated[2]), (3, generated[3])]
    assert saves["third"] == [3, 4, 5]


def test_a_loop_in_a_loop() -> None:
    # contract: C5
    saves = run(
        llama(),
        """
        seen = [].save()
        for outer in tracer.iter[0:5]:
            seen.append(("outer", outer))
            for inner in tracer.iter[1:3]:
                seen.append(("inner", inner, int(model.samples)))
        """,
        tokens=6,
    )
    generated = plain(llama(), [3, 1, 4], 6).generated
    assert saves["seen"] == [
        ("outer", 0),
        ("inner", 1, generated[1]),
        ("inner", 2, generated[2]),
        ("outer", 2),
        ("inner", 2, generated[2]),
        ("outer", 3),
        ("outer", 4),
    ]


def test_break_and_continue() -> None:
    # contract: C5
    saves = run(
        llama(),
        """
        seen = [].save()
        for step in tracer.iter[:]:
            if step == 1:
                continue
            if step == 3:
                break
            seen.append((step, int(model.samples)))
        else:
            seen.append("else")
        seen.append(int(model.logits.argmax()))
        """,
        tokens=6,
    )
    generated = plain(llama(), [3, 1, 4], 6).generated
    assert saves["seen"] == [(0, generated[0]), (2, generated[2]), generated[3]]


def test_the_else_of_a_loop_that_outran_its_request_runs() -> None:
    # contract: C5
    assert run(llama(), "for step in tracer.iter[:]: pass\nelse: x = step\nx.save()", tokens=3) == {"x": 2}


def test_next() -> None:
    # contract: C5
    saves = run(
        llama(),
        """
        tokens = [int(model.samples)].save()
        steps = [tracer.next()].save()
        tokens.append(int(model.samples))
        steps.append(tracer.next())
        steps.append(tracer.next())
        tokens.append(int(model.samples))
        """,
        tokens=5,
    )
    generated = plain(llama(), [3, 1, 4], 4).generated
    assert saves == {"steps": [1, 2, 3], "tokens": [generated[0], generated[1], generated[3]]}


def test_next_behind_the_end() -> None:
    # contract: C5
    request = Request([3, 1], "x = 1\nx.save()\ntracer.next()\ntracer.next()", 2)
    Engine(llama()).run(request, check=False)
    assert isinstance(request.error, NeverRanError)
    assert "tracer.next() asked for step 2, but the request ended before it" in str(request.error)
    assert line_of(request.error) == 4
    assert request.saves == {"x": 1}


def test_a_loop_in_a_helper_and_in_a_comprehension() -> None:
    # contract: C5
    saves = run(
        llama(),
        """
        def tokens():
            for step in tracer.iter[0:2]:
                yield int(model.samples)
        first = list(tokens()).save()
        rest = [int(model.samples) for step in tracer.iter[2:]].save()
        """,
        tokens=5,
    )
    assert [*saves["first"], *saves["rest"]] == plain(llama(), [3, 1, 4], 5).generated


def test_requests_that_join_and_leave_count_their_own_steps() -> None:
    # contract: C5
    model = llama()
    block = """
        seen = [].save()
        for step in tracer.iter[:]:
            seen.append((step, int(model.samples)))
        """
    requests = [Request([n + 1] * (n + 1), block, tokens=6 - n, joins=n) for n in range(5)]
    Engine(model).run(*requests)
    for request in requests:
        assert request.saves["seen"] == list(enumerate(plain(model, request.prompt, request.tokens).generated))


# Stopping.


@pytest.mark.parametrize(
    "block",
    [
        "for step in tracer.iter[:]:\n    if step == 2: tracer.stop()",
        "def helper():\n    while True: tracer.stop()\ntracer.next(); tracer.next()\nhelper()",
        "for step in tracer.all():\n    for i in range(9):\n        if step == 2: [tracer.stop() for _ in 'a']",
        "for step in tracer.iter[:]:\n    model.samples\n    if step == 2: tracer.stop()",
        "try:\n    for step in tracer.all():\n        if step == 2: tracer.stop()\nexcept Exception: pass",
        "for step in tracer.iter[:]:\n    try:\n        if step == 2: tracer.stop()\n    except BaseException: pass",
    ],
)
def test_case_08_stop_ends_this_block_from_any_depth(block: str) -> None:
    # contract: C6
    model = llama()
    stopped = Request([3, 1], "kept = 1\nkept.save()\n" + block + "\nafter = 1\nafter.save()", 9)
    other = Request([4, 5], "seen = [int(model.samples) for step in tracer.iter[:]].save()", 7)
    Engine(model).run(other, stopped, Request([6], None, 7))
    assert stopped.probe.stopped
    assert stopped.error is None
    assert stopped.probe.dead
    assert "kept" in stopped.saves
    assert len(stopped.generated) == 3
    assert other.saves["seen"] == plain(model, [4, 5], 7).generated


def test_a_block_that_catches_its_stop_gets_no_further_site() -> None:
    # contract: C6
    model = llama()
    request = Request(
        [3, 1],
        """
        seen = [].save()
        for attempt in range(3):
            try:
                tracer.stop()
            except BaseException as error:
                seen.append(type(error).__name__)
            try:
                model.logits
            except BaseException as error:
                seen.append(type(error).__name__)
        """,
        9,
    )
    Engine(model).run(request)
    assert request.saves["seen"] == ["StopBlock"] * 6
    assert request.probe.stopped
    assert len(request.generated) == 1


def test_finally_and_with_run_when_a_block_is_stopped() -> None:
    # contract: C6
    request = Request(
        [3, 1],
        """
        seen = [].save()
        try:
            with torch.no_grad():
                tracer.stop()
        finally:
            seen.append("finally")
        """,
        5,
    )
    Engine(llama()).run(request)
    assert request.saves["seen"] == ["finally"]


# The rest of tracer.


def test_result_is_known_only_when_the_request_is_over() -> None:
    # contract: C7
    error = failing(llama(), "x = 1\ntracer.result.outputs")
    assert isinstance(error, UsageError)
    assert "tracer.result.outputs was read in a block" in str(error)
    assert line_of(error) == 2
    saves = run(llama(), "result = tracer.result.save()")
    assert saves["result"].reference() == ("result",)


def test_a_barrier_is_refused_by_name() -> None:
    # contract: C7
    error = failing(llama(), "tracer.barrier(2)")
    assert isinstance(error, UnsupportedError)
    assert "tracer.barrier is refused: requests are scheduled independently" in str(error)


def test_an_invoke_in_a_block_is_refused() -> None:
    # contract: C7
    error = failing(llama(), "with tracer.invoke('x'): pass")
    assert isinstance(error, UsageError)


@pytest.mark.parametrize("name", ["stop", "next", "cache"])
def test_what_belongs_in_a_block_is_refused_outside(name: str) -> None:
    # contract: C7
    with pytest.raises(UsageError, match="only inside a block"):
        getattr(Engine(llama()).tracer, name)()


# Prompts that are run in parts.


def test_a_part_of_a_prompt_makes_no_token() -> None:
    # contract: C5
    model = llama()
    block = """
        logits, steps = [].save(), [].save()
        for step in tracer.iter[:]:
            logits.append(model.logits)
            steps.append((step, int(model.samples)))
        """
    request = Request([3, 1, 4, 1, 5], block, 3, parts=[2, 2, 1])
    beside = Request([9, 9], block, 6)
    Engine(model).run(beside, request)
    for one in (request, beside):
        expected = plain(model, one.prompt, one.tokens)
        assert one.saves["steps"] == list(enumerate(expected.generated))
        assert same(one.saves["logits"], expected.logits)


def test_next_counts_generated_steps_and_not_parts() -> None:
    # contract: C5
    saves = Engine(llama()).run(
        Request([3, 1, 4, 1, 5], "n = tracer.next()\ntoken = int(model.samples)\n[n, token].save()", 3, parts=[2, 2, 1])
    )
    assert list(saves.values()) == [[1, plain(llama(), [3, 1, 4, 1, 5], 2).generated[1]]]


@pytest.mark.parametrize("site", ["model.model.layers[1].mlp.output", "model.logits", "model.samples"])
def test_a_request_that_sits_out_a_step_is_not_given_anothers_rows(site: str) -> None:
    # contract: C2
    model = llama()
    prompt = [3, 1, 4, 1, 5]
    waits = Request(
        prompt,
        f"model.model.layers[2].mlp.output\nmodel.logits\nvalue = {site}.save()" if "layers" not in site else
        f"model.model.layers[2].mlp.output\nvalue = {site}.save()",
        1, parts=[2, 3], pauses=frozenset({1, 2}),
    )  # fmt: skip
    engine = Engine(model)
    engine.run(Request([1, 1], "model.logits"))
    other = Request([7, 7, 7], "values = [model.model.layers[1].mlp.output for step in tracer.iter[:]].save()", 5)
    engine.run(other, waits, check=False)
    expected = plain(model, prompt, 1, ("model.layers.1.mlp",))
    assert same(other.saves["values"], [
        plain(model, [7, 7, 7], 5, ("model.layers.1.mlp",)).seen[step, "model.layers.1.mlp", "output"]
        for step in range(5)
    ])  # fmt: skip
    if "logits" in site:
        assert same(waits.saves["value"], expected.logits[0])
    elif "samples" in site:
        assert waits.saves["value"].tolist() == [expected.generated]
    elif waits.error is None:
        assert same(waits.saves["value"], expected.seen[0, "model.layers.1.mlp", "output"][2:])
    else:
        assert isinstance(waits.error, OutOfOrderError)
