"""What the names and expressions of a block may be, as far as that tells which modules' sites it can reach.

See :mod:`endoscope.tracing.reach`. A module that goes where it is not followed (to a function of somewhere else, into
an object or a container that may have other names) *escapes*: from then on any of its sites may be asked for at any
time.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from endoscope.tracing.outside import MODEL, MODULES, TRACER
from endoscope.tracing.rewrite import SAVE
from endoscope.tracing.scopes import bound_names

EVERYTHING = "**"
SITES = frozenset({"input", "inputs", "output", "resid_pre", "resid_post", "skip"})
_ENGINES = frozenset({"logits", "samples", "tokenizer"})
"""What of the model is no module's."""
CACHE = "@cache"

_DYNAMIC = frozenset(
    {"exec", "eval", "globals", "locals", "vars", "compile", "__import__", "__builtins__"}
    | {"builtins", "sys", "inspect", "gc"}
)
"""Names with which what is not in the text reaches the block's names."""
_FRAMES = frozenset({"f_globals", "f_locals", "f_back", "gi_frame", "cr_frame", "tb_frame", "obj"})
"""Attributes with which it does."""
_PASS_ON = frozenset({"enumerate", "zip", "reversed", "list", "tuple", "iter", "next", "set"})
"""Functions of Python's whose results hold what they are given, or its elements."""
_LOOK_AT = frozenset({"len", "print", "str", "repr", "type", "id", "isinstance", "range", "int", "bool", "hash"})
"""Functions of Python's that keep nothing of what they are given."""


Path = tuple[str, ...]
Modules = frozenset[Path]
NO_MODULES: Modules = frozenset()


class Value(NamedTuple):
    """What modules something may be or hold."""

    itself: Modules = NO_MODULES
    elements: Modules = NO_MODULES
    """Those that it may hold."""
    deeper: Modules = NO_MODULES
    """Those that what it holds may hold, however deep."""

    @property
    def all(self) -> Modules:
        return self.itself | self.elements | self.deeper

    def __or__(self, other: Value) -> Value:
        return Value(*(_limited(one | another) for one, another in zip(self, other, strict=True)))

    def element(self, index: str = "[*]") -> Value:
        """What an element of it may be."""
        return Value(self.child(index) | self.elements, self.deeper, self.deeper)

    def child(self, name: str) -> Modules:
        return frozenset(_child(path, name) for path in self.itself) if self.itself else NO_MODULES


NOTHING = Value()


class Reader:
    """Works out what names may stand for, and which sites each statement can reach.

    For every name: the modules that it may be, and those that it may hold, whatever is bound to it anywhere.

    Args:
        body: the statements of a block as they run.
        outside: the outside names that stand for modules, or hold some.
    """

    def __init__(self, body: list[ast.stmt], outside: Any) -> None:
        self.body = body
        self.names: dict[str, Value] = {}
        self.constants: dict[str, int | str] = {}
        """What names from outside stand for that are a number or a text."""
        self.tracers: set[str] = set()
        self.anywhere: set[Path] = set()
        """Sites that can be reached from wherever the block stands."""
        self.of: dict[ast.stmt, set[Path]] = {}
        """Sites of each statement."""
        self.functions: dict[str, ast.FunctionDef | ast.Lambda] = {}
        """The functions of the block, where a name stands for one of them alone."""
        self.loose_now = False
        """Whether the statement stands in a function or a class, and runs when somebody calls for it."""
        self.in_class = False
        self.now = self.anywhere
        nodes = [node for statement in body for node in ast.walk(statement)]
        bound = Counter(name for node in nodes for name in bound_names(node))
        bound.update(node.arg for node in nodes if isinstance(node, ast.arg))
        for name, kind, value in outside:
            bound[name] += 0
            if kind == TRACER:
                self.tracers.add(name)
            elif kind in (MODEL, MODULES):
                self.names[name] = value
            elif kind and not bound[name]:
                self.constants[name] = ast.literal_eval(kind)
        self.taken = {*bound}
        """Names that are not those of Python's own functions."""
        self.rebound = {name for name, count in bound.items() if count}
        outer = {name for name, *_ in outside}
        for statement in body:
            match statement:
                case ast.FunctionDef(name, decorator_list=[]) if bound[name] == 1 and name not in outer:
                    self.functions[name] = statement
                case ast.Assign([ast.Name(name)], ast.Lambda() as value) if bound[name] == 1 and name not in outer:
                    self.functions[name] = value
        before: Any = None
        while before != self.names:
            before = dict(self.names)
            for statement in body:
                self.statement(statement)
        self._all: dict[ast.stmt, frozenset[Path]] = {}

    # The result.

    def result(self) -> tuple[tuple[int, ...], tuple[tuple[str, ...], ...]]:
        """Lines, and for each the sites that are reached from the lines up to it on."""
        lines: list[int] = []
        sites: list[tuple[str, ...]] = []
        first = min((each.lineno for each in self.body), default=0)
        last = max((each.end_lineno or each.lineno for each in self.body), default=0)
        for line in [0, *range(first, last + 1)]:
            found = tuple(sorted(map(_written, self.anywhere | self.after(self.body, line))))
            if EVERYTHING in found:
                found = (EVERYTHING,)
            if sites and sites[-1] == found:
                lines[-1] = line
            else:
                lines.append(line)
                sites.append(found)
        return tuple(lines), tuple(sites)

    def after(self, body: list[ast.stmt], line: int) -> set[Path]:
        """The sites of what may run after the line in these statements; the line's own among them."""
        for index, statement in enumerate(body):
            if line <= (statement.end_lineno or statement.lineno):
                rest = self.all(body[index + 1 :])
                if line < statement.lineno:
                    return rest | self.all([statement])
                return rest | self.within(statement, line)
        return set()

    def within(self, statement: ast.stmt, line: int) -> set[Path]:
        match statement:
            case ast.If(test, body, orelse):
                if line <= (test.end_lineno or test.lineno):
                    return self.all([statement])
                inner = body if line <= (body[-1].end_lineno or 0) else orelse
                return self.after(inner, line)
            case ast.With(_, body) if line >= body[0].lineno:
                # What the context does at its end is a function's of its own.
                return self.after(body, line)
        return self.all([statement])

    def all(self, body: list[ast.stmt]) -> set[Path]:
        """The sites of statements, with all that is in them."""
        found: set[Path] = set()
        for statement in body:
            if statement not in self._all:
                inner = (node for node in ast.walk(statement) if isinstance(node, ast.stmt))
                self._all[statement] = frozenset(site for node in inner for site in self.of.get(node, ()))
            found |= self._all[statement]
        return found

    # Statements.

    def statement(self, node: ast.stmt) -> None:
        outer, self.now = self.now, self.of.setdefault(node, set())
        if self.loose_now:
            self.now = self.anywhere
        self._statement(node)
        self.now = outer

    def run(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value):
                self.value(value)
            case ast.Assign(targets, value):
                given = self.value(value)
                for target in targets:
                    self.assign(target, value, given)
            case ast.AnnAssign(target, annotation, value, _):
                self.escape(self.value(annotation))
                if value is not None:
                    self.bind(target, self.value(value))
            case ast.AugAssign(target, _, value):
                # In place, if it is a container, which may have other names.
                self.escape(self.value(target) | self.value(value))
            case ast.For(target, source, body, orelse) | ast.AsyncFor(target, source, body, orelse):
                self.loop(target, source)
                self.run([*body, *orelse])
            case ast.If(test, body, orelse) | ast.While(test, body, orelse):
                self.value(test)
                self.run([*body, *orelse])
            case ast.With(items, body) | ast.AsyncWith(items, body):
                for item in items:
                    given = self.value(item.context_expr)
                    self.escape(given)
                    if item.optional_vars is not None:
                        self.bind(item.optional_vars, NOTHING)
                self.run(body)
            case ast.Try(body, handlers, orelse, final) | ast.TryStar(body, handlers, orelse, final):
                self.run(body)
                for handler in handlers:
                    if handler.type is not None:
                        self.escape(self.value(handler.type))
                    self.run(handler.body)
                self.run([*orelse, *final])
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.signature(node.args)
                for each in filter(None, [*node.decorator_list, node.returns]):
                    self.escape(self.value(each))
                self.inside(node.body, self.in_class)
            case ast.ClassDef(_, bases, keywords, body):
                for each in [*bases, *(keyword.value for keyword in keywords), *node.decorator_list]:
                    self.escape(self.value(each))
                self.inside(body, True)
            case ast.Return(value):
                if value is not None:
                    self.escape(self.value(value))
            case _:
                # Whatever else there is, its parts are looked at, and what they may be can go anywhere.
                for part in ast.walk(node):
                    if isinstance(part, ast.stmt) and part is not node:
                        self.statement(part)
                for part in ast.iter_child_nodes(node):
                    self.loose(part)

    def inside(self, body: list[ast.stmt], in_class: bool) -> None:
        """Statements of a function or a class."""
        outer = self.loose_now, self.in_class
        self.loose_now, self.in_class = True, in_class
        self.run(body)
        self.loose_now, self.in_class = outer

    def signature(self, arguments: ast.arguments) -> None:
        """Defaults and annotations of a function's arguments."""
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        annotations = [each.annotation for each in every if each is not None]
        for each in filter(None, [*arguments.defaults, *arguments.kw_defaults, *annotations]):
            self.escape(self.value(each))

    def loose(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self.escape(self.value(node))
        elif not isinstance(node, ast.stmt):
            for part in ast.iter_child_nodes(node):
                self.loose(part)

    def loop(self, target: ast.expr, source: ast.expr) -> None:
        """Bind a loop's target to what it goes over."""
        given = self.value(source)
        match target, source:
            case ast.Tuple([number, each]), ast.Call(ast.Name("enumerate"), [one], _) if (
                "enumerate" not in self.taken and not any(isinstance(part, ast.Starred) for part in (number, each, one))
            ):
                self.bind(number, NOTHING)
                self.bind(each, self.value(one).element())
            case ast.Tuple(targets), ast.Call(ast.Name("zip"), sources, _) if (
                "zip" not in self.taken
                and len(targets) == len(sources)
                and not any(isinstance(each, ast.Starred) for each in [*targets, *sources])
            ):
                for each, one in zip(targets, sources, strict=True):
                    self.bind(each, self.value(one).element())
            case _:
                self.bind(target, given.element())

    def assign(self, target: ast.expr, value: ast.expr, given: Value) -> None:
        match target, value:
            case (ast.Tuple(targets), ast.Tuple(values)) if len(targets) == len(values) and not any(
                isinstance(each, ast.Starred) for each in [*targets, *values]
            ):
                for one, other in zip(targets, values, strict=True):
                    self.assign(one, other, self.value(other))
            case _:
                self.bind(target, given)

    def bind(self, target: ast.expr, given: Value) -> None:
        if self.in_class:
            self.escape(given)
        match target:
            case ast.Name(name):
                if name in self.tracers and given.all:
                    self.everything()
                self.names[name] = self.names.get(name, NOTHING) | given
            case ast.Tuple(targets) | ast.List(targets):
                for each in targets:
                    # A starred target is a list of what the others would be.
                    self.bind(each, given if isinstance(each, ast.Starred) else given.element())
            case ast.Starred(inner):
                element = given.element()
                self.bind(inner, Value(NO_MODULES, element.itself, element.deeper))
            case _:
                # An attribute of an object, or an element of a container that may have other names.
                self.value(target)
                self.escape(given)

    # Expressions.

    def value(self, node: ast.expr) -> Value:
        """The modules that an expression may be, and those that it may hold."""
        match node:
            case ast.Constant():
                return NOTHING
            case ast.Name(name):
                if name in _DYNAMIC:
                    self.everything()
                if name in self.tracers:
                    # Where only some of it is used, this is not come by.
                    self.everything()
                return self.names.get(name, NOTHING)
            case ast.Attribute(ast.Name(name)) if name in self.tracers:
                if node.attr in ("cache", "__class__") or node.attr.startswith("_"):
                    self.everything()  # not where it is called
                return NOTHING
            case ast.Attribute(ast.Name(name)) if (member := f"{name}.{node.attr}") in self.names:
                return self.names[member]
            case ast.Attribute(value, name):
                return self.attribute(self.value(value), name)
            case ast.Subscript(container, index):
                self.escape(self.value(index))
                return self.item(self.value(container), index)
            case ast.Compare(left, operators, others):
                for each in (left, *others):
                    given = self.value(each)
                    if not all(isinstance(operator, ast.Is | ast.IsNot) for operator in operators):
                        self.escape(given)
                return NOTHING
            case ast.BinOp(left, _, right):
                one, other = self.value(left), self.value(right)
                if not (one.all and other.all) or one.itself or other.itself:
                    # An object of a class of its own may define the operator.
                    self.escape(one | other)
                return one | other
            case ast.Call():
                return self.call(node)
            case ast.NamedExpr(target, value):
                given = self.value(value)
                self.bind(target, given)
                return given
            case ast.Tuple(parts) | ast.List(parts) | ast.Set(parts):
                return self.holding(*parts)
            case ast.Dict(keys, parts):
                for key, part in zip(keys, parts, strict=True):
                    if key is None:
                        self.escape(self.value(part))
                return self.holding(*filter(None, keys), *(part for key, part in zip(keys, parts, strict=True) if key))
            case ast.Starred(inner):
                return self.value(inner).element()
            case ast.ListComp(part, generators) | ast.SetComp(part, generators) | ast.GeneratorExp(part, generators):
                return self.comprehension(node, generators, part)
            case ast.DictComp(key, part, generators):
                return self.comprehension(node, generators, key, part)
            case ast.Lambda(arguments, body):
                self.signature(arguments)
                outer, self.now = self.now, self.anywhere
                given = self.value(body)
                self.now = outer
                self.escape(given)
                return NOTHING
            case ast.Yield() | ast.YieldFrom() | ast.Await():
                if node.value is not None:
                    self.escape(self.value(node.value))
                return NOTHING
        given = NOTHING
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                given |= self.value(child)
        return given

    def comprehension(self, node: ast.expr, generators: list[ast.comprehension], *parts: ast.expr) -> Value:
        outer = self.now
        if isinstance(node, ast.GeneratorExp):
            # It runs when somebody goes through it.
            self.now = self.anywhere
        for each in generators:
            self.loop(each.target, each.iter)
            for test in each.ifs:
                self.value(test)
        held = self.holding(*parts)
        self.now = outer
        return held

    def holding(self, *parts: ast.expr) -> Value:
        """A container of these."""
        value = NOTHING
        for part in parts:
            value |= self.value(part)
        return Value(NO_MODULES, value.itself, value.elements | value.deeper)

    def attribute(self, given: Value, name: str) -> Value:
        if name in _FRAMES:
            self.everything()
        if name.startswith("_") or name == "get_submodule":
            self.escape(given)  # where it is called at once, this is not come by
            return NOTHING
        held = Value(NO_MODULES, given.elements, given.deeper)
        if name in SITES:
            # A skip that is not called at once may be called from wherever the block stands.
            (self.anywhere if name == "skip" else self.now).update((*path, name) for path in given.itself)
            return held
        of_engine = frozenset({()}) if name in _ENGINES else NO_MODULES
        return Value(Value(given.itself - of_engine).child(name)) | held

    def item(self, given: Value, index: ast.expr) -> Value:
        match index:
            case ast.Constant(number) if type(number) is int:
                return given.element(f"[{number}]")
            case ast.UnaryOp(ast.USub(), ast.Constant(number)) if type(number) is int:
                return given.element(f"[-{number}]")
            case ast.Name(name) if type(self.constants.get(name)) is int:
                return given.element(f"[{self.constants[name]}]")
            case ast.Constant(text) if type(text) is str and text.isidentifier():
                return given.element(text)
            case ast.Slice():
                return Value(NO_MODULES, given.child("[*]") | given.elements, given.deeper)
        return given.element()

    # Calls.

    def call(self, node: ast.Call) -> Value:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        match node.func:
            case ast.Name(name) if name == SAVE and node.args:
                for each in node.args[1:]:
                    self.value(each)
                return self.value(node.args[0])
            case ast.Name(name) if (function := self.functions.get(name)) is not None:
                return self.own(name, function, node)
            case ast.Name(name) if (
                name in _LOOK_AT and name not in self.taken and (name != "type" or len(arguments) == 1)
            ):
                for each in arguments:
                    self.value(each)
                return NOTHING
            case ast.Name(name) if name in _PASS_ON and name not in self.taken and self.is_plain(name, node):
                return self.passed_on(name, [self.value(each) for each in arguments])
            case ast.Attribute(ast.Name(name), "cache") if name in self.tracers:
                self.cache(node)
                return NOTHING
            case ast.Attribute(module, "get_submodule"):
                return self.submodule(self.value(module), node)
            case ast.Attribute(module, "skip"):
                given = self.value(module)
                self.now.update((*path, "skip") for path in given.itself)
                for each in arguments:
                    self.escape(self.value(each))
                return NOTHING
        callee = self.value(node.func)
        for each in arguments:
            given = self.value(each)
            # A module takes the modules themselves, without their sites.
            if not self.is_module(node.func):
                self.escape(given)
        match node.func:
            case ast.Attribute(_, "items"):
                return Value(NO_MODULES, NO_MODULES, callee.all)
            case ast.Attribute(_, "values" | "keys" | "copy"):
                return Value(NO_MODULES, callee.elements, callee.deeper)
        # Any other method of a container gives something that it holds, or another container.
        held = callee.elements | callee.deeper
        return Value(held, held, held)

    def is_module(self, node: ast.expr) -> bool:
        """Whether an expression is surely a module of the model, or a method of one."""
        match node:
            case ast.Name(name):
                return bool(self.names.get(name, NOTHING).itself) and name not in self.rebound
            case ast.Attribute(value, name):
                return self.is_module(value) and not name.startswith("_") and name not in SITES | _ENGINES
            case ast.Subscript(value, index):
                return self.is_module(value) and not isinstance(index, ast.Slice)
        return False

    @staticmethod
    def is_plain(name: str, node: ast.Call) -> bool:
        """Whether a function of Python's is called in the way in which it passes on elements, and nothing else."""
        starred = any(isinstance(each, ast.Starred) for each in node.args)
        keywords = {keyword.arg for keyword in node.keywords} - {"strict", "start"}
        return not starred and not keywords and (name not in ("iter", "next") or len(node.args) == 1)

    @staticmethod
    def passed_on(name: str, given: list[Value]) -> Value:
        """What a function of Python's gives that hands on what it is given."""
        element = NOTHING
        for each in given:
            element |= each.element()
        match name:
            case "next":
                return element
            case "enumerate" | "zip":
                return Value(NO_MODULES, NO_MODULES, element.all)
        return Value(NO_MODULES, element.itself, element.elements | element.deeper)

    def submodule(self, given: Value, node: ast.Call) -> Value:
        """``get_submodule``, called at once."""
        path: Any = None
        match node:
            case ast.Call(_, [ast.Constant(text)], []):
                path = text
            case ast.Call(_, [ast.Name(name)], []):
                path = self.constants.get(name)
        for each in [*node.args, *(keyword.value for keyword in node.keywords)]:
            self.escape(self.value(each))
        self.escape(Value(NO_MODULES, given.elements, given.deeper))
        if type(path) is not str:
            return Value(given.child(EVERYTHING))
        modules = given.itself
        for name in path.split(".") if path else ():
            modules = Value(modules).child(name)
        return Value(modules)

    def own(self, name: str, function: ast.FunctionDef | ast.Lambda, node: ast.Call) -> Value:
        """A call of a function of the block. What it returns can go anywhere."""
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        takes = {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
        starred = False
        for index, each in enumerate(node.args):
            given = self.value(each)
            starred = starred or isinstance(each, ast.Starred)
            if starred or index >= len(names):
                self.escape(given)
            else:
                self.bind(ast.Name(names[index], ast.Store()), given)
        for keyword in node.keywords:
            given = self.value(keyword.value)
            if keyword.arg in takes:
                self.bind(ast.Name(keyword.arg, ast.Store()), given)
            else:
                self.escape(given)
        return NOTHING

    def cache(self, node: ast.Call) -> None:
        """What ``tracer.cache`` keeps."""
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not arguments:
            self.now.add((CACHE,))
        for each in arguments:
            parts = each.elts if isinstance(each, ast.List | ast.Tuple) else [each]
            for part in parts:
                match part:
                    case ast.Constant(None):
                        self.now.add((CACHE,))
                    case ast.Constant(pattern) if type(pattern) is str:
                        self.now.add((pattern + CACHE,))
                    case ast.Attribute() | ast.Subscript() if (modules := self.value(part)).all:
                        self.now.update((*path, "output") for path in modules.all)
                    case ast.Name(name) if name in self.names and name not in self.rebound and self.names[name].itself:
                        self.now.update((*path, "output") for path in self.names[name].itself)
                    case _:
                        self.everything()

    # What is not followed any further.

    def escape(self, given: Value) -> None:
        """Whatever these are, somebody may ask for any of their sites at any time."""
        self.anywhere.update(_child(path, EVERYTHING) for path in given.all)

    def everything(self) -> None:
        self.anywhere.add((EVERYTHING,))


_DEEP = 12
"""Longer paths are not followed: a loop in a block can make one of any length."""
_MANY = 24
"""Nor are more paths than this for one name."""


def _child(path: Path, name: str) -> Path:
    if path and path[-1] == EVERYTHING:
        return path
    return (*path, EVERYTHING) if len(path) >= _DEEP else (*path, name)


def _limited(modules: Modules) -> Modules:
    """The modules, or if they are too many, all that are inside of what they have in common."""
    if len(modules) > 1 and (whole := {path[:-1] for path in modules if path and path[-1] == EVERYTHING}):
        modules = frozenset(
            path for path in modules if path[:-1] in whole or not any(path[: len(each)] == each for each in whole)
        )
    if len(modules) <= _MANY:
        return modules
    low, high = min(modules), max(modules)
    common = next((i for i, (one, other) in enumerate(zip(low, high, strict=False)) if one != other), len(low))
    return frozenset({(*low[:common], EVERYTHING)})


def _written(path: Path) -> str:
    text = ""
    for name in path:
        text += name if name.startswith("[") or not text else f".{name}"
    return text
