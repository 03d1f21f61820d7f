"""What travels, how, and what is refused."""

from __future__ import annotations

import asyncio
import collections
import enum
import functools
import importlib
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from tracing_support import FakeBackend, NoBackend, python, trace

from endoscope.errors import SerializationError
from endoscope.tracing.origin import is_users
from endoscope.tracing.serialize import Referenced, dumps, loads


class Model(Referenced):
    def reference(self) -> tuple[str, ...]:
        return ("model",)


model = Model()
ENGINE = object()


def uses_model(x: int) -> Any:
    return model, x


@dataclass
class Point:
    x: int
    y: list[int] = field(default_factory=list)


class Colour(enum.Enum):
    RED = 1


def back(value: Any, **keywords: Any) -> Any:
    return loads(dumps(value, **keywords), {("model",): ENGINE, ("tokenizer",): "tok"}.__getitem__)


def test_plain_values() -> None:
    value = {"a": [1, 2.5, None, True], "b": {"c": (b"x", frozenset({1}))}, "d": collections.OrderedDict(x=1)}
    assert back(value) == value


def test_references() -> None:
    tokenizer = object()
    data = {"m": model, "again": [model], "t": tokenizer}
    got = back(data, references={id(tokenizer): ("tokenizer",)})
    assert got == {"m": ENGINE, "again": [ENGINE], "t": "tok"}


# contract: C1
def test_the_users_functions_travel_by_value_and_refer_to_the_model() -> None:
    assert is_users(__name__)
    copy = back(uses_model)
    assert copy is not uses_model
    assert copy(3) == (ENGINE, 3)
    assert b"uses_model" in dumps(uses_model)
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_closures_lambdas_and_partials() -> None:
    offset = 5
    assert back(lambda x: x + offset)(1) == 6
    assert back(functools.partial(uses_model, 4))() == (ENGINE, 4)


def test_installed_packages_and_the_standard_library_travel_by_name() -> None:
    assert not is_users("json")
    assert not is_users("cloudpickle")
    assert not is_users("endoscope.tracing.serialize")
    assert not is_users("builtins")
    assert not is_users(None)
    assert back(json.dumps) is json.dumps
    assert back(cloudpickle.Pickler) is cloudpickle.Pickler
    assert back(json) is json


def test_round_trip_gives_the_clients_own_class() -> None:
    got = back(back([Point(1, [2]), Point, Colour.RED]))
    assert got == [Point(1, [2]), Point, Colour.RED]
    assert type(got[0]) is Point
    assert got[2] is Colour.RED
    assert [each.name for each in fields(got[0])] == ["x", "y"]


def test_a_value_of_another_process_can_be_read_back(tmp_path: Path) -> None:
    """The engine has never seen the user's module; what it makes of its classes is read as the client's own."""
    (tmp_path / "in").write_bytes(dumps({"point": Point(1, [2]), "function": uses_model}))
    printed = python(
        "-c",
        "import sys, pathlib; from endoscope.tracing.serialize import dumps, loads\n"
        "got = loads(pathlib.Path('in').read_bytes(), lambda key: key)\n"
        "got['point'].x += 1; got['said'] = got['function'](2)\n"
        "assert 'test_serialize' not in sys.modules\n"
        "del got['function']\n"
        "pathlib.Path('out').write_bytes(dumps(got))",
        cwd=tmp_path,
    )
    assert printed == ""
    got = loads((tmp_path / "out").read_bytes(), lambda key: key)
    assert got == {"point": Point(2, [2]), "said": (("model",), 2)}
    assert type(got["point"]) is Point


def test_the_users_modules_travel_by_name_with_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "their_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("value = 42\n")
    with monkeypatch.context() as patched:
        patched.syspath_prepend(str(tmp_path))
        inner = importlib.import_module("their_package.inner")
        data = dumps([inner, importlib.import_module("their_package")])
    for name in ("their_package", "their_package.inner"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    got = loads(data, lambda key: key)
    assert got[0].value == 42
    assert sys.path[-1] == str(tmp_path)


def test_main_and_made_up_modules() -> None:
    made = type(sys)("made_up")
    made.value = 3  # type: ignore[attr-defined]
    assert back(made).value == 3
    with pytest.raises(SerializationError, match="module __main__"):
        dumps(sys.modules["__main__"])


def numbers() -> Iterator[int]:
    yield 1


async def nothing() -> None:
    pass


async def ticks() -> Any:
    yield 1


def refused() -> list[tuple[Any, str]]:
    loop = asyncio.new_event_loop()
    coroutine = nothing()
    coroutine.close()
    found = [
        (open(__file__, encoding="utf-8"), "an open file"),  # noqa: SIM115
        (open(__file__, "rb"), "an open file"),  # noqa: SIM115
        (__import__("socket").socket(), "a socket"),
        (threading.Lock(), "a lock"),
        (threading.RLock(), "a lock"),
        (threading.Event(), "a lock"),
        (threading.Thread(), "a thread"),
        (numbers(), "a generator"),
        (ticks(), "an asynchronous generator"),
        (coroutine, "a coroutine"),
        (loop, "an event loop"),
        (loop.create_future(), "a future or task"),
        (sys._getframe(), "a frame"),
        ([{"deep": threading.Lock()}], "a lock"),
        (Point(1, [threading.Lock()]), "a lock"),  # type: ignore[list-item]
    ]
    loop.close()
    return found


# contract: C1
def test_case_34_what_cannot_travel_is_refused_with_a_reason() -> None:
    for value, reason in refused():
        with pytest.raises(SerializationError, match=reason):
            dumps(value)
        getattr(value, "close", lambda: None)()
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(SerializationError, match="a process"):
        dumps(process)
    assert isinstance(SerializationError("x"), TypeError)


def test_case_34_greenlets() -> None:
    greenlet = pytest.importorskip("greenlet")
    with pytest.raises(SerializationError, match="a greenlet"):
        dumps(greenlet.greenlet(numbers))


def test_files_in_memory_travel() -> None:
    assert back(io.BytesIO(b"x")).read() == b"x"
    assert back(io.StringIO("x")).read() == "x"


def test_an_object_that_fails_in_its_own_way() -> None:
    class Odd:
        def __reduce__(self) -> Any:
            raise ValueError("not me")

    with pytest.raises(SerializationError, match="pickle says: not me"):
        dumps(Odd())


# contract: C1
def test_case_34_a_block_names_the_variable_before_anything_is_submitted() -> None:
    backend = NoBackend()
    lock = threading.Lock()
    with pytest.raises(SerializationError, match=r"'lock', a _thread\.lock, which cannot be sent.*a lock") as caught:
        with trace("p", backend):
            taken = lock
    assert __file__ in str(caught.value)
    assert backend.tracer is None
    with open(__file__, encoding="utf-8") as file, pytest.raises(SerializationError, match=r"'file'.*an open file"):
        with trace("p", backend):
            taken = file.read()
    generator = numbers()
    with pytest.raises(SerializationError, match=r"'generator'.*a generator"):
        with trace("p", backend):
            taken = list(generator)
    assert "taken" not in locals()
    assert backend.tracer is None


def test_a_name_that_the_block_binds_itself_may_be_unsendable_outside() -> None:
    thing: Any = threading.Lock()
    with trace("p", backend := FakeBackend()):
        if len("x") == 1:
            thing = 5
        got = thing
    assert (thing, got) == (5, 5)
    assert "thing" in backend.namespaces[0]


def test_arrays_take_only_their_own_bytes() -> None:
    numpy = pytest.importorskip("numpy")
    large = numpy.arange(1_000_000, dtype="float32").reshape(1000, 1000)
    for view in (large[3], large[:, 3], large[3, 3:4], large[::-1][:2]):
        assert len(dumps(view)) < 20_000
        buffers: list[Any] = []
        data = dumps(view, buffers=buffers)
        got = loads(data, lambda key: key, [bytes(buffer) for buffer in buffers])
        assert (got == view).all()
        got[:] = 0
    assert large[3, 3] == 3003


def test_threads_do_not_take_by_value_from_each_other() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                assert back(uses_model) is not uses_model
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert cloudpickle.list_registry_pickle_by_value() == set()
