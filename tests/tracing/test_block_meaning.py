"""A block means what the same lines would mean in place."""

from __future__ import annotations

import ast
import traceback
from typing import Any

import msgspec
import pytest
from tracing_support import FakeBackend, NoBackend, trace

from endoscope.tracing import Tracer
from endoscope.tracing.block import Code
from endoscope.tracing.flow import names_of

number = 7


def shared(x: int) -> int:
    return x + number


# contract: C1
def test_case_32_walrus() -> None:
    with trace("p"):
        if (half := 10 // 2) > 3:
            doubled = half * 2
        total = [last := each for each in range(3)]
    assert (half, doubled, total, last) == (5, 10, [0, 1, 2], 2)


def test_case_32_comprehension() -> None:
    outer = 3
    with trace("p"):
        lists = [[i * j * outer for i in range(2)] for j in range(2)]
        table = {key: value for key, value in zip("ab", (1, 2), strict=True) if value > 1}
        generated = sum(x for x in lists[1])
    assert (lists, table, generated) == ([[0, 0], [0, 3]], {"b": 2}, 3)


def test_case_32_nested_def() -> None:
    base = 10
    with trace("p"):

        def add(x: int, y: int = base) -> int:
            def deeper() -> int:
                return x + y + base

            return deeper()

        async def later() -> Any:
            return [await each async for each in base]

        def counting() -> Any:
            yield from range(3)

        result = add(1)
        listed = list(counting())
        square = (lambda x: x * x)(3)
    assert (result, listed, square) == (21, [0, 1, 2], 9)


def test_case_32_recursive_def_and_nonlocal() -> None:
    with trace("p"):
        count = 0

        def factorial(n: int) -> int:
            nonlocal count
            count += 1
            inner = 0

            def also() -> None:
                nonlocal inner, count
                inner += 1

            also()
            return 1 if n < 2 else n * factorial(n - 1)

        value = factorial(5)
    assert (value, count) == (120, 5)


def test_case_32_try_finally() -> None:
    order: list[str] = []
    with trace("p"):
        try:
            try:
                raise ValueError("x")
            finally:
                order.append("finally")
        except ValueError as error:
            text = str(error)
        else:
            text = "none"
        done = order
    assert (text, done) == ("x", ["finally"])


def test_case_32_del() -> None:
    gone = 1
    with trace("p", backend := FakeBackend()):
        kept = gone + 1
        del gone
        temporary = 2
        del temporary
    assert kept == 2
    assert "gone" not in backend.namespaces[0]


def test_case_32_f_string_and_multi_line_call() -> None:
    name, width = "x", 6
    with trace("p"):
        text = (
            f"{name!r:>{width}}|{name + 'y'}"
            + """
  raw text stays
as it is"""
        )
        joined = "-".join(
            [
                name,
                "y",
            ]
        )
    assert text == "   'x'|xy\n  raw text stays\nas it is"
    assert joined == "x-y"


def test_case_32_a_comprehensions_target_is_not_the_global_of_that_name() -> None:
    with trace("p"):
        both = number + sum([number * 1 for number in range(3)])
        later = (lambda: shared)()
        others = [shared + 0 for shared in range(2)]
    assert (both, later(1), others) == (10, 8, [0, 1])


def test_match_star_and_augmented() -> None:
    value: Any = [1, 2, 3]
    counter = 1
    with trace("p"):
        match value:
            case [first, *rest] if first:
                kind = "list"
            case {"a": inner, **others}:
                kind = "dict"
            case _:
                kind = "?"
        counter += 5
        a, (b, *c) = 1, (2, 3, 4)
    assert (first, rest, kind, counter, a, b, c) == (1, [2, 3], "list", 6, 1, 2, [3, 4])


def test_annotations_of_variables_are_not_evaluated() -> None:
    with trace("p"):
        x: DoesNotExist = 1  # type: ignore[name-defined] # noqa: F821
        y: AlsoNot  # type: ignore[name-defined] # noqa: F821, F842
    assert x == 1


def test_names_from_everywhere() -> None:
    local = 1

    with trace("p"):
        total = shared(local) + number + len([1])
        module = __name__

        class Made:
            pass

        owner = Made.__module__
    assert total == 1 + 7 + 7 + 1
    assert module == owner == __name__


def test_private_names() -> None:
    class __Owner:
        def __init__(self) -> None:
            self.__hidden = 5
            self.__dunder__ = 6

        def read(self) -> Any:
            __local = 2
            with trace("p"):
                got = self.__hidden + __local
                __bound = got + self.__dunder__

                class Inner:
                    __own = 3

                    def get(self) -> int:
                        return self.__own

                inner = Inner().get()
            return got, __bound, inner

    assert __Owner().read() == (7, 13, 3)


class Base:
    def hello(self) -> str:
        return "base"


class Derived(Base):
    def hello(self) -> str:
        with trace("p"):
            text = super().hello() + " derived"
            name = __class__.__name__

            def helper(me: Any) -> str:
                return super().hello()

            again = helper(self)

            class Other(Base):
                def hello(self) -> str:
                    return super().hello() + " other"

            other = Other().hello()
        return f"{text} {name} {again} {other}"


def test_super_and_class_cell() -> None:
    assert Derived().hello() == "base derived Derived base base other"


def test_save_calls_are_rewritten_everywhere() -> None:
    backend = FakeBackend()
    values = [1, 2]
    with trace("p", backend):
        one = values[0].save()  # type: ignore[attr-defined]
        (values[1] + 1).save()  # type: ignore[attr-defined]

        def nested(x: Any) -> Any:
            return x.save()

        nested(5)
        many = [v.save() for v in values]
        chained = values.save().save()
    texts = [text for text, _ in backend.saved]
    assert texts == ["values[0]", "values[1] + 1", "x", "v", "v", "values", "values.save()"]
    assert (one, many, chained) == (1, [1, 2], [1, 2])


def test_save_with_arguments_is_left_alone() -> None:
    class File:
        def save(self, path: str) -> str:
            return path

    file = File()
    with trace("p"):
        path = file.save("here")
    assert path == "here"


def test_case_33_name_bound_only_later() -> None:
    with pytest.raises(NameError, match="later") as caught:
        with trace("p"):
            a = 1
            b = later  # noqa: F821
            later = 2
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.name, last.line) == (__file__, "<block>", "b = later  # noqa: F821")
    assert "a" not in locals()
    assert "b" not in locals()


def test_case_33_a_local_that_is_unbound_is_not_taken_from_the_globals() -> None:
    with pytest.raises(NameError, match="number"):
        with trace("p"):
            copied = number  # noqa: F823
            number = 3
    assert "copied" not in locals()


def test_case_33_name_bound_nowhere() -> None:
    with pytest.raises(NameError, match="nowhere_at_all"):
        with trace("p"):
            x = nowhere_at_all  # type: ignore[name-defined] # noqa: F821
    assert "x" not in locals()


def test_case_16_and_35_values_are_those_of_the_call() -> None:
    seen: list[Any] = []
    backends = [FakeBackend() for _ in range(3)]
    for index, backend in enumerate(backends):
        with trace("p", backend):
            mine = index * 10
        seen.append(mine)
    codes = {backend.tracer.invokes[0].block.code.key for backend in backends}  # type: ignore[union-attr]
    assert seen == [0, 10, 20]
    assert len(codes) == 1


def test_case_35_two_in_flight_do_not_mix() -> None:
    held: list[Tracer] = []
    for vector in ([1], [2]):
        backend = NoBackend()
        with trace("p", backend):
            taken = vector[0]
        assert backend.tracer is not None
        held.append(backend.tracer)
    runner = FakeBackend(write=False)
    assert [runner.run(tracer, tracer.invokes[0])["taken"] for tracer in held] == [1, 2]
    assert "taken" not in locals()


# contract: A6
def test_without_bind_the_name_stays_unbound() -> None:
    with trace("p", FakeBackend(write=False)):
        unbound = 1
    with pytest.raises(UnboundLocalError):
        print(unbound)


def test_lines_and_columns_are_the_files() -> None:
    backend = NoBackend()
    é = 1
    with trace("p", backend): ü = "é" + (é).missing; z = 2  # fmt: skip # noqa: E701, E702
    with open(__file__, encoding="utf-8") as file:
        lines = file.read().split("\n")
    code = backend.tracer.invokes[0].block.code.compile()  # type: ignore[union-attr]
    line = next(
        n for n, text in enumerate(lines, 1) if 'ü = "é"' in text and "assert" not in text and "next" not in text
    )
    texts = {
        lines[at - 1].encode()[start:end].decode()
        for at, _, start, end in code.co_positions()
        if at == line and start is not None
    }
    assert {"(é).missing", '"é" + (é).missing', "z"} <= texts
    assert code.co_filename == __file__
    assert code.co_name == code.co_qualname == "<block>"


def test_a_code_survives_its_message() -> None:
    backend = NoBackend()
    with trace("p", backend), trace("q"):
        x = 1
    code = backend.tracer.invokes[0].block.code  # type: ignore[union-attr]
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(code), type=Code)
    assert again == code
    assert again.compile() is code.compile()
    assert len(code.key) == 64


def test_tabs_and_continuation_lines(tmp_path: Any) -> None:
    path = tmp_path / "tabs.py"
    path.write_text(
        "def f(trace):\n\tif 1:\n\t\twith trace('p'):\n\t\t\tx = (1 +\n 2)\n\t\t\tif x:\n\t\t\t\ty = x \\\n+ 1\n"
        "\t\t\t# a comment at the end\n\treturn x, y\n"
    )
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert names["f"](trace) == (3, 4)


@pytest.mark.parametrize(
    ("text", "outside", "binds"),
    [
        ("x = 1\nx", "", "x"),
        ("x\nx = 1", "x", "x"),
        ("x += 1", "x", "x"),
        ("if a:\n  x = 1\nx", "a x", "x"),
        ("if a:\n  x = 1\nelse:\n  x = 2\nx", "a", "x"),
        ("for i in a:\n  x = i\nx", "a x", "i x"),
        ("for i in a:\n  pass\nelse:\n  y = 1\ni", "a i", "i y"),
        ("while a:\n  x = 1\nx", "a x", "x"),
        ("while (x := a):\n  pass\nx", "a", "x"),
        ("try:\n  x = 1\nexcept E:\n  pass\nx", "E x", "x"),
        ("try:\n  x = 1\nexcept E:\n  x = 2\nx", "E", "x"),
        ("try:\n  x = 1\nfinally:\n  y = x\nx, y", "x", "x y"),
        ("try:\n  import json\nexcept E as e:\n  json = e\njson", "E", "json e"),
        ("with a as b:\n  x = 1\nb, x", "a x", "b x"),
        ("match a:\n  case [p, *q] if p:\n    pass\n  case {'k': r, **s}:\n    r, s\np", "a p", "p q r s"),
        ("[x for x in a if x]\nx", "a x", ""),
        ("[y := x for x in a]\ny", "a y", "y"),
        ("[x for x in a for y in x for z in w]", "a w", ""),
        ("a and (x := b)\nx", "a b x", "x"),
        ("(x := a) and b\nx", "a b", "x"),
        ("(x := 1) if a else (x := 2)\nx", "a", "x"),
        ("del x", "x", ""),
        ("x = 1\ndel x\nx", "", "x"),
        ("def f(a, b=c, *d, e: g, **h) -> i:\n  return a, b, d, e, h, j\nf", "c g i j", "f"),
        ("def f():\n  x = 1\n  def g():\n    return x, y\n  return g", "y", "f"),
        ("def f():\n  global x\n  x = 1\nf()\nx", "x", "f x"),
        ("x = 1\ndef f():\n  return x", "", "x f"),
        ("def f():\n  return x\nx = 1", "x", "f x"),
        ("lambda a, b=c: a + b + d", "c d", ""),
        ("class A(B, metaclass=M):\n  x = y\n  z = x\n  def f(self):\n    return x, A", "A B M x y", "A"),
        ("@deco\nclass A:\n  pass\nA", "deco", "A"),
        ("import a.b.c, d as e\nfrom f import g as h, i", "", "a e h i"),
        ("from . import x", "__package__", "x"),
        ("a.b = c\na[d] = e", "a c d e", ""),
        ("x, (y, *z) = a", "a", "x y z"),
        ("x: T = 1\nx", "", "x"),
        ("f'{a!r:{b}}'", "a b", ""),
        ("assert (x := a), b\nx", "a b x", "x"),
        ("global x\nx = 1", "", "x"),
        ("a < (x := b) < (y := c)\nx, y", "a b c y", "x y"),
        ("a.save()", "a", ""),
    ],
)
def test_what_a_block_takes_from_outside(text: str, outside: str, binds: str) -> None:
    code = Code.make("\n".join("  " + line for line in text.split("\n")), "f.py", 1, 2)
    reads, stores = names_of(code.rewritten())
    assert set(reads) == set(outside.split())
    assert set(stores) == set(binds.split())


def test_a_lone_string_is_not_a_docstring() -> None:
    names: dict[str, Any] = {}
    exec(Code.make("  'text'\n  x = 1", "f.py", 1, 2).compile(), names)
    assert "__doc__" not in names


def test_future_flags_are_kept() -> None:
    with trace("p"):

        def annotated(x: DoesNotExist) -> None:  # type: ignore[name-defined] # noqa: F821
            pass

        note = annotated.__annotations__["x"]
    assert note == "DoesNotExist"


def test_unparsed_text_is_what_the_user_wrote() -> None:
    tree = ast.parse("model.layers[ 3 ].output.save()")
    assert ast.unparse(tree.body[0].value.func.value) == "model.layers[3].output"  # type: ignore[attr-defined]
