"""A block: the body of a user's ``with`` as something that can be sent to another process and run there."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from endoscope.errors import SerializationError
from endoscope.tracing.names import lookup
from endoscope.tracing.reach import HIDDEN, UNREAD, Reach, hidden_first, reach
from endoscope.tracing.reads import reads_only
from endoscope.tracing.rewrite import rewrite
from endoscope.tracing.serialize import MARK, dumps
from endoscope.tracing.sites import name_items
from endoscope.tracing.skips import skips_throughout

if TYPE_CHECKING:
    from endoscope.tracing.source import Place


class Code(msgspec.Struct, frozen=True):
    """The text of a block, and what is needed to compile it as if it still stood in its file.

    One place in a user's program gives one ``Code``, however often it is traced; ``key`` names it, so that it need be
    sent and compiled only once.

    Attributes:
        key: sha256, in hexadecimal, of everything else.
        source: the text as it stands in the file. It begins with its first line's indentation, or, when it shares
            that line with the ``with``, at its first statement.
        filename: the file that the text is from, as tracebacks name it.
        line: the line in the file, from 1, of the first line of the text.
        column: the column, in bytes of UTF-8, of the first statement.
        class_name: the class around the block, which its private names are mangled for.
        flags: the compiler flags of the file's ``from __future__`` imports.
        first_argument: the first argument of the function around the block, for ``super()``.
        items: 0 where ``source`` is the body alone. Otherwise ``source`` is the whole ``with`` statement, whose first
            ``items`` items are left out: ``with trace, torch.no_grad():`` has the second item inside the block.
    """

    key: str
    source: str
    filename: str
    line: int
    column: int
    class_name: str | None = None
    flags: int = 0
    first_argument: str | None = None
    items: int = 0

    @classmethod
    def make(
        cls,
        source: str,
        filename: str,
        line: int,
        column: int,
        class_name: str | None = None,
        flags: int = 0,
        first_argument: str | None = None,
        items: int = 0,
    ) -> Code:
        """Return the code with its key computed; the arguments are the attributes of the class."""
        rest = (source, filename, line, column, class_name, flags, first_argument, items)
        key = hashlib.sha256(repr(rest).encode("utf-8", "surrogatepass")).hexdigest()
        return cls(key, *rest)

    def written(self) -> list[ast.stmt]:
        """Return the block's statements as the user wrote them, at the lines and columns of the file."""
        flags = self.flags | ast.PyCF_ONLY_AST
        indent = "" if self.source[:1] in (" ", "\t", "\f") else " " * self.column
        wrapped = bool(indent) or self.source[:1] in (" ", "\t", "\f")
        text = f"if 1:\n{indent}{self.source}\n" if wrapped else f"{self.source}\n"
        tree: Any = compile(text, self.filename, "exec", flags=flags, dont_inherit=True)
        ast.increment_lineno(tree, self.line - (2 if wrapped else 1))
        body: list[ast.stmt] = tree.body[0].body if wrapped else tree.body
        if self.items:
            (statement,) = body
            assert isinstance(statement, ast.With)
            del statement.items[: self.items]
        return body

    def rewritten(self) -> list[ast.stmt]:
        """Return the block's statements as they run: top-level code over a flat namespace."""
        return rewrite(self.written(), self.class_name, self.first_argument)

    def compile(self) -> CodeType:
        """Compile the block, to be run with ``exec(code, namespace)``.

        The namespace is one dict that holds the outside values and receives the names that the block binds. It also
        holds ``__endoscope_save__``, which is called with a value and the text of its expression for each
        ``value.save()``, and ``__endoscope_output__``, which is called with an object and a number for each
        ``module.output[0]``. Lines, columns and the filename are those of the user's file, so tracebacks show it.
        """
        return _compile(self)


@lru_cache(maxsize=1024)
def _compile(unit: Code) -> CodeType:
    tree = ast.Module(name_items(unit.rewritten()), [])
    code: CodeType = compile(tree, unit.filename, "exec", flags=unit.flags, dont_inherit=True)
    return code.replace(co_name="<block>", co_qualname="<block>")


@dataclass(frozen=True, slots=True)
class Block:
    """A block with the values that it takes from outside.

    Attributes:
        code: its text.
        values: the outside values: a dict by name, serialized.
        binds: the names that it binds; true where the function around it declares the name ``global``.
        reads_only: whether it is known to change nothing of the model.
        skips_throughout: whether it is known to skip in every step what it skips in one.
        reach: the sites that it can ask for.
    """

    code: Code
    values: bytes
    binds: Mapping[str, bool]
    reads_only: bool = False
    skips_throughout: bool = False
    reach: Reach = UNREAD

    @classmethod
    def capture(cls, place: Place, frame: FrameType, references: Mapping[int, tuple[str, ...]]) -> Block:
        """Read a block and its outside values from the frame that it is written in.

        A name that is nowhere to be found is left out, so that the block raises ``NameError`` at the line that reads
        it. So is a value that cannot travel under a name that the block itself binds, since the block most likely
        never reads it.

        Args:
            place: where the block stands.
            frame: the frame that runs the code around it.
            references: what travels by reference: ``id(object)`` to the key that the engine resolves.

        Raises:
            SerializationError: a value that the block takes from outside cannot travel.
        """
        values = lookup(frame, place.outside, place.variables)
        values = hidden_first(place.code, values, references)
        met: list[tuple[str, ...]] = []
        try:
            data = dumps(values, references, met=met)
        except SerializationError:
            for name, value in list(values.items()):
                try:
                    dumps(value, references)
                except SerializationError as error:
                    if name not in place.binds:
                        raise _unsendable(place, name, value, error) from error.__cause__
                    del values[name]
            met.clear()
            data = dumps(values, references, met=met)
        hidden = met[: met.index(MARK)] if MARK in met else ()
        values.pop(HIDDEN, None)
        reads = reads_only(place.code, values, references)
        throughout = skips_throughout(place.code, values, references)
        return cls(place.code, data, place.binds, reads, throughout, reach(place.code, values, hidden))


def _unsendable(place: Place, name: str, value: object, error: SerializationError) -> SerializationError:
    kind = type(value)
    return SerializationError(
        f"{place.code.filename}:{place.line}: the block reads {name!r}, a {kind.__module__}.{kind.__qualname__}, which "
        f"cannot be sent to the engine: {error} Read what you need of it before the with, or make it in the block."
    )
