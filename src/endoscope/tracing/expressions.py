"""What the value of an expression may be, as far as that tells whether something is changed: see ``reads``."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from endoscope.tracing import pure
from endoscope.tracing.outside import MODEL, MODULES, PLAIN, SAVES, TOKENIZER, TRACER
from endoscope.tracing.rewrite import SAVE

# What a value may be. None of them: a number, a text, or a tensor or container that the block has made.
SHARED = 1  # somebody else may hold it
HANDED = 2  # it is or holds something that a module was called with, which may be another module
VIEW = 4  # it is or holds a module, or something of one
FOREIGN = HANDED | VIEW

_VALUES = {PLAIN: SHARED, MODULES: SHARED | VIEW}


class Doubt(Exception):
    """Something in the text is not known to change nothing."""


class Expressions:
    """The names of a block, and what its expressions may be.

    Args:
        outside: what its names from outside are.
    """

    def __init__(self, outside: Mapping[str, str]) -> None:
        self.names: dict[str, int] = {}
        """What the names may be that the block binds."""
        self.stored = 0
        """What may be in the containers that the block has changed, whichever they are."""
        self.known = {name: kind for name, kind in outside.items() if kind not in _VALUES}
        """Names that stand for one thing only: modules of Python's, the model, the tracer."""
        self.plain = {name: _VALUES[kind] for name, kind in outside.items() if kind in _VALUES}
        """What the other names from outside may be."""

    # Names.

    def load(self, name: str) -> int:
        if name in self.known:
            # It may be nothing else, and what is done with it is looked at where it stands.
            if self.known[name] != MODEL:
                raise Doubt
            return VIEW | SHARED
        if name in self.names or name in self.plain:
            return self.names.get(name, 0) | self.plain.get(name, 0)
        if name in pure.ERRORS:
            return SHARED
        raise Doubt

    def bind(self, target: ast.expr, kind: int) -> None:
        match target:
            case ast.Name(name):
                self.names[name] |= kind
            case ast.Tuple(targets) | ast.List(targets):
                for each in targets:
                    self.bind(each, self.element(kind))
            case ast.Starred(ast.Name(name)):
                self.names[name] |= kind & FOREIGN  # a list of its own
            case ast.Subscript(container, index):
                if self.value(container) & SHARED:
                    raise Doubt
                self.value(index)
                self.stored |= kind & FOREIGN
            case _:
                raise Doubt

    def element(self, kind: int) -> int:
        """What an element of such a value may be."""
        return kind & FOREIGN | self.stored | SHARED

    # Expressions.

    def values(self, *nodes: ast.expr | None) -> int:
        kind = 0
        for node in nodes:
            if node is not None:
                kind |= self.value(node)
        return kind

    def value(self, node: ast.expr) -> int:
        match node:
            case ast.Constant():
                return 0
            case ast.Name(name):
                return self.load(name)
            case ast.Attribute():
                return self.attribute(node)
            case ast.Call():
                return self.call(node)
            case ast.Subscript(container, index):
                self.value(index)
                return self.element(self.value(container))
            case ast.Slice(lower, upper, step):
                self.values(lower, upper, step)
                return 0
            case ast.NamedExpr(target, value):
                kind = self.value(value)
                self.bind(target, kind)
                return kind
            case ast.Tuple(parts) | ast.List(parts) | ast.Set(parts):
                return self.values(*parts) & FOREIGN
            case ast.Dict(keys, parts):
                return self.values(*keys, *parts) & FOREIGN
            case ast.Starred(value):
                return self.element(self.value(value))
            case ast.JoinedStr(parts):
                self.values(*parts)
                return 0
            case ast.FormattedValue(value, _, form):
                self.values(value, form)
                return 0
            case ast.BinOp(left, operator, right):
                kind = self.values(left, right) & FOREIGN
                # What comes out is new, if nobody has defined the operator. Others than these make no containers.
                if isinstance(operator, ast.MatMult | ast.Div | ast.FloorDiv | ast.Pow):
                    return SHARED if kind else 0
                return kind | SHARED if kind else 0
            case ast.UnaryOp(ast.Not(), operand):
                self.value(operand)
                return 0
            case ast.UnaryOp(_, operand):
                return self.value(operand)  # `+h` is `h`
            case ast.BoolOp(_, parts):
                return self.values(*parts)
            case ast.Compare(left, _, others):
                self.values(left, *others)
                return SHARED
            case ast.IfExp(test, body, orelse):
                self.value(test)
                return self.values(body, orelse)
            case ast.ListComp(part, generators) | ast.SetComp(part, generators) | ast.GeneratorExp(part, generators):
                self.generators(generators)
                return self.value(part) & FOREIGN
            case ast.DictComp(key, part, generators):
                self.generators(generators)
                return self.values(key, part) & FOREIGN
        raise Doubt

    def generators(self, generators: list[ast.comprehension]) -> None:
        for each in generators:
            if each.is_async:
                raise Doubt
            self.bind(each.target, self.element(self.value(each.iter)))
            self.values(*each.ifs)

    def named(self, node: ast.expr) -> str | None:
        """What the expression stands for, if that is one known thing: ``torch.nn.functional``, say."""
        match node:
            case ast.Name(name):
                return self.known.get(name)
            case ast.Attribute(ast.Name(name), "tokenizer") if self.known.get(name) == MODEL:
                return TOKENIZER
            case ast.Attribute(value, name) if (outer := self.named(value)) is not None:
                inner = f"{outer}.{name}"
                return inner if inner in pure.FUNCTIONS else None
        return None

    def attribute(self, node: ast.Attribute) -> int:
        name, known = node.attr, self.named(node.value)
        if name.startswith("_"):
            raise Doubt
        if known == MODEL and name in ("logits", "samples"):
            return SHARED
        if known is not None and known != MODEL:
            if name in pure.CONSTANTS.get(known, ()) or (known == TOKENIZER and name in pure.TOKENIZER_ATTRIBUTES):
                return 0
            if known == TRACER and name in ("iter", "result"):
                return SHARED
            raise Doubt
        kind = self.value(node.value)
        if kind & FOREIGN == VIEW:
            if name in ("output", "resid_pre", "resid_post"):
                return SHARED
            return HANDED | SHARED if name in ("input", "inputs") else VIEW | SHARED
        if name in pure.ATTRIBUTES or (self.is_limits(node.value) and name in pure.LIMITS):
            return kind & FOREIGN | SHARED
        raise Doubt

    def is_limits(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(ast.Attribute(value, "finfo" | "iinfo")):
                return self.named(value) == "torch"
        return False

    def is_no_grad(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(ast.Attribute(value, "no_grad"), [], []):
                return self.named(value) == "torch"
        return False

    # Calls.

    def call(self, node: ast.Call) -> int:
        match node.func:
            case ast.Name(name):
                return self.function(name, node)
            case ast.Attribute(value, name):
                known = self.named(value)
                if known is None or known == MODEL:
                    return self.method(value, name, node)
                return self.known_function(known, name, node)
        raise Doubt

    def arguments(self, node: ast.Call, any_keyword: bool = False) -> int:
        """What the arguments of a call may be."""
        for keyword in node.keywords:
            if keyword.arg is None or not (any_keyword or keyword.arg in pure.KEYWORDS):
                raise Doubt
        return self.values(*node.args, *(keyword.value for keyword in node.keywords))

    def function(self, name: str, node: ast.Call) -> int:
        known = SAVES if name == SAVE else self.known.get(name)
        if known == SAVES:
            if not node.args or isinstance(node.args[0], ast.Starred):
                raise Doubt
            self.arguments(node)
            return self.value(node.args[0])
        if known is not None or name in self.names or name in self.plain:
            raise Doubt
        if name == "isinstance":
            self.is_instance(node)
            return 0
        if name in pure.ERRORS:
            self.arguments(node)
            return SHARED
        if name not in pure.BUILTINS:
            raise Doubt
        kind = self.arguments(node, any_keyword=name == "dict")
        if name in pure.PLAIN_BUILTINS:
            return 0
        if name in pure.MAKING_BUILTINS:
            return (kind | self.stored) & FOREIGN
        return self.element(kind)

    def is_instance(self, node: ast.Call) -> None:
        match node:
            case ast.Call(_, [value, ast.Tuple(types)], []):
                pass
            case ast.Call(_, [value, one], []):
                types = [one]
            case _:
                raise Doubt
        self.value(value)
        for kind in types:
            match kind:
                case ast.Name(name) if name in pure.TYPES and not {name} & {*self.names, *self.plain, *self.known}:
                    pass
                case ast.Attribute(module, "Tensor") if self.named(module) == "torch":
                    pass
                case _:
                    raise Doubt

    def known_function(self, known: str, name: str, node: ast.Call) -> int:
        if known == TRACER:
            if name not in ("all", "cache", "emit", "next", "stop"):
                raise Doubt
            self.arguments(node, any_keyword=name in ("emit", "cache"))
            return SHARED
        if known == TOKENIZER:
            if name not in pure.TOKENIZER_METHODS:
                raise Doubt
            self.arguments(node)
            return SHARED
        if name not in pure.FUNCTIONS.get(known, ()):
            raise Doubt
        path = f"{known}.{name}"
        if path in pure.AT_MOST and (
            len(node.args) > pure.AT_MOST[path] or any(isinstance(each, ast.Starred) for each in node.args)
        ):
            raise Doubt
        self.arguments(node)
        return 0 if path in pure.MAKING else SHARED

    def method(self, receiver: ast.expr, name: str, node: ast.Call) -> int:
        kind = self.value(receiver)
        given = self.arguments(node)
        if name in pure.CHANGES and (not kind & SHARED or (self.is_inside(receiver) and not kind & FOREIGN)):
            self.stored |= given & FOREIGN
            return self.element(kind)
        if not kind & FOREIGN or not kind & SHARED:
            if name in pure.MAKE:
                return kind & FOREIGN
            if name in pure.CONTAINER_METHODS:
                return self.element(kind | given)
            if name in pure.TENSOR_METHODS:
                return SHARED
        elif name in pure.ANYWHERE and all(map(_is_literal, [*node.args, *(each.value for each in node.keywords)])):
            return SHARED
        elif name == "get_submodule" and kind & FOREIGN == VIEW:
            return VIEW | SHARED
        raise Doubt

    def is_inside(self, node: ast.expr) -> bool:
        """Whether it is an element of a container that the block has made, such as ``rows.setdefault(step, [])``.

        If it is a tensor, it has none of the methods that change a container.
        """
        match node:
            case ast.Subscript(outer) | ast.Call(ast.Attribute(outer, "get" | "setdefault")):
                return self.is_inside(outer)
        return not self.value(node) & SHARED


def _is_literal(node: ast.expr) -> bool:
    match node:
        case ast.Constant():
            return True
        case ast.UnaryOp(ast.USub(), operand):
            return _is_literal(operand)
        case ast.Tuple(parts) | ast.List(parts):
            return all(map(_is_literal, parts))
    return False
