"""What a block sees of the model: its modules by name, and the values of their sites."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from typing import Any

from greenlet import getcurrent

from endoscope.errors import SiteError, UnknownModuleError
from endoscope.probing.handoff import Handoffs
from endoscope.probing.probe import Probe, current_probe
from endoscope.probing.site import Station
from endoscope.tracing.serialize import Referenced


class ModuleView(Referenced):
    """One module of the model, as a block sees it.

    ``output``, ``input`` and ``inputs`` are what the module returns and is called with, for the rows of
    the block's own request: ``[tokens, hidden]``, all rows of the prompt in the first step and one row
    in each later one. Anything else is the module's own: its children, parameters and methods.
    A view is called as the module is, which runs it with no part in the pass.
    """

    def __init__(self, handoffs: Handoffs, station: Station) -> None:
        self._handoffs = handoffs
        self._station = station

    def reference(self) -> tuple[str, ...]:
        """The module travels home as its path."""
        return ("module", self._station.path)

    @property
    def output(self) -> Any:
        """What the module returned, with this request's rows of each tensor.

        Reading it waits until the module has run in this step. The value can be edited in place, or
        another assigned.
        """
        site, probe = self._station.output, getcurrent()
        if type(probe) is not Probe:
            probe = current_probe(site.name)
        return probe.take(site)

    @output.setter
    def output(self, value: Any) -> None:
        current_probe(self._station.output.name).replace(self._station.output, value)

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the module is called with, as ``(args, kwargs)``."""
        return current_probe(self._station.inputs.name).take(self._station.inputs)  # type: ignore[no-any-return]

    @inputs.setter
    def inputs(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        current_probe(self._station.inputs.name).replace(self._station.inputs, value)

    @property
    def input(self) -> Any:
        """The first argument that the module is called with, by position or else by name."""
        args, kwargs = self.inputs
        return args[0] if args else next(iter(kwargs.values()), None)

    @input.setter
    def input(self, value: Any) -> None:
        args, kwargs = self.inputs
        if args:
            self.inputs = ((value, *args[1:]), kwargs)
        else:
            self.inputs = (args, {**kwargs, next(iter(kwargs), "input"): value})

    @property
    def resid_pre(self) -> Any:
        """The whole residual stream before a decoder layer, ``[tokens, hidden]``; read and write."""
        return current_probe(self._station.resid_pre.name).take(self._station.resid_pre)

    @resid_pre.setter
    def resid_pre(self, value: Any) -> None:
        current_probe(self._station.resid_pre.name).replace(self._station.resid_pre, value)

    @property
    def resid_post(self) -> Any:
        """The whole residual stream after a decoder layer, ``[tokens, hidden]``; read and write."""
        return current_probe(self._station.resid_post.name).take(self._station.resid_post)

    @resid_post.setter
    def resid_post(self, value: Any) -> None:
        current_probe(self._station.resid_post.name).replace(self._station.resid_post, value)

    def skip(self, value: Any) -> None:
        """Give a value in the place of what the module would return, for this request's rows.

        The rows of other requests are the module's own. Where every request of the step skips the module, it
        does not run, save for its keys and values, as below. (It does in the first pass that any block of the
        engine takes part in, in which the order of the model is learned, and its result is thrown away.) What
        stands inside the module cannot be asked for in the same step.

        A skip stands in the order of the model where :attr:`input` does, which may be read before it, and
        the block goes on behind the module, where :attr:`output` is what was given::

            x = model.model.layers[3].mlp.input
            model.model.layers[3].mlp.skip(torch.zeros_like(x))

        A decoder layer is skipped with the residual stream behind it, as one tensor, also where it returns a
        pair ``(hidden_states, residual)``; such a pair is taken as well, with a ``residual`` of ``None`` for
        zeros. So this goes past a layer::

            layer.skip(layer.resid_pre)

        **Attention.** Only the result of a module with attention is replaced, as by a hook: its keys and values are
        written from what it is called with, so that later steps that do not skip it find them. For that it
        runs although every request skips it, unless none has a later step that could read them: in the last step
        of ``max_tokens``, and for a block whose text shows that it skips the module in every step. That is seen
        where all its skips stand in the body of ``for step in tracer.iter[:]`` or ``tracer.all()``, or of a loop in
        there over modules or numbers that are the same in each step, under no ``if``, ``while``, ``try`` or
        ``with``, and no ``break`` or ``continue`` in the loop.

        Args:
            value: of the structure and shapes of :attr:`output`, this request's rows of each tensor; of dtypes
                that can be cast to its.

        Raises:
            ReplacementError: if the value does not fit.
            OutOfOrderError: if the step is past the module's beginning already.
            MissingStateError: later, if the module runs for the request in a step after one in which it did not,
                since the block skipped it in what only seemed to be every step.
        """
        probe = current_probe(self._station.skip.name)
        # What the text of the block tells is of what it calls itself.
        throughout = probe.skips_throughout and sys._getframe(1).f_code is probe.code
        self._handoffs.skips.ask(probe, self._station, value, throughout)

    def get_submodule(self, path: str) -> ModuleView:
        """The module at a dotted path below this one, also where its name is that of an attribute of the view."""
        view = self
        for name in path.split(".") if path else ():
            view = view._child(name)
        return view

    def _child(self, name: str) -> ModuleView:
        own = self._station.path
        station = self._handoffs.stations.get(f"{own}.{name}" if own else name)
        if station is None:
            raise UnknownModuleError(unknown(self._handoffs, self._station, name))
        return self._view(station)

    def _view(self, station: Station) -> ModuleView:
        if station.view is None:
            station.view = ModuleView(self._handoffs, station)
        return station.view  # type: ignore[no-any-return]

    def _children(self) -> list[ModuleView]:
        children: list[ModuleView] | None = self.__dict__.get("_all")
        if children is None:
            # named_children leaves out a module that stands there a second time.
            modules = self._station.module._modules
            children = [self._child(name) for name, module in modules.items() if module is not None]
            self.__dict__["_all"] = children
        return children

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_endoscope") or name in ("_handoffs", "_station"):
            raise AttributeError(name)
        own = self._station.path
        station = self._handoffs.stations.get(f"{own}.{name}" if own else name)
        if station is not None:
            # Kept where the next look-up finds it without coming here.
            view = self.__dict__[name] = self._view(station)
            return view
        try:
            return getattr(self._station.module, name)
        except AttributeError:
            raise UnknownModuleError(unknown(self._handoffs, self._station, name)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_handoffs", "_station", "_tokenizer") or isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
            return
        raise UnknownModuleError(
            f"{self._station.path or 'the model'}.{name} cannot be assigned: a block can assign output, input, inputs, "
            f"resid_pre and resid_post of a module, and logits and samples of the model"
        )

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, str):
            if "." in index:
                raise UnknownModuleError(
                    f"{self._station.path or 'the model'}[{index!r}]: a text in square brackets names a module right "
                    f"below; for a path, write get_submodule({index!r})"
                )
            return self._child(index)
        children = self._children()
        try:
            return children[index]
        except IndexError:
            raise UnknownModuleError(
                f"{self._station.path or 'the model'}[{index}] was asked for, but it has {len(children)} modules"
            ) from None

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._station.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[ModuleView]:
        return iter(self._children())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._station in self._handoffs.stateful:
            raise SiteError(
                f"{self._station.path or 'the model'} ({type(self._station.module).__name__}) cannot be called in a "
                f"block: it holds attention, which would read and write the keys and values of the requests of this "
                f"step. Modules without it can be, such as norms, projections and MLPs"
            )
        return self._station.module(*map(module_of, args), **{name: module_of(arg) for name, arg in kwargs.items()})

    def __repr__(self) -> str:
        return f"<{self._station.path or 'model'}: {type(self._station.module).__name__}>"


class ModelView(ModuleView):
    """The whole model, as a block sees it.

    Attributes:
        tokenizer: the model's tokenizer, or ``None``.
    """

    def __init__(self, handoffs: Handoffs, tokenizer: Any = None) -> None:
        super().__init__(handoffs, handoffs.stations[""])
        self._tokenizer = tokenizer

    def reference(self) -> tuple[str, ...]:
        """The model travels home as a reference to it."""
        return ("model",)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._tokenizer() if callable(self._tokenizer) else self._tokenizer

    @property
    def logits(self) -> Any:
        """Logits of the next token, ``[1, vocabulary]``, before sampling; read and write."""
        return current_probe("logits").take(self._handoffs.logits)

    @logits.setter
    def logits(self, value: Any) -> None:
        current_probe("logits").replace(self._handoffs.logits, value)

    @property
    def samples(self) -> Any:
        """The sampled token's id, ``[1, 1]``; read and write. What is assigned is the token that is generated."""
        return current_probe("samples").take(self._handoffs.samples)

    @samples.setter
    def samples(self, value: Any) -> None:
        current_probe("samples").replace(self._handoffs.samples, value)


def output_of(owner: Any, item: int) -> Any:
    """What ``owner.output[item]`` becomes in a block."""
    if not isinstance(owner, ModuleView):
        return owner.output[item]
    site, probe = owner._station.output, getcurrent()
    if type(probe) is not Probe:
        probe = current_probe(site.name)
    return probe.take_item(site, item)


def unknown(handoffs: Handoffs, station: Station, name: str) -> str:
    """The message for a name that a module does not have, with the nearest that there are."""
    path = station.path
    asked = f"{path}.{name}" if path else name
    prefix = f"{path}." if path else ""
    children = [child for child, _ in station.module.named_children()]
    # The same name further up or down the tree is the usual slip: a level left out, or one too many.
    elsewhere = [p for p in handoffs.stations if p.rpartition(".")[2] == name.rpartition(".")[2]]
    near = [prefix + match for match in difflib.get_close_matches(name, children, n=3)]
    near += sorted(elsewhere, key=len)[:3]
    near += difflib.get_close_matches(asked, handoffs.stations, n=3)
    nearest = list(dict.fromkeys(near))[:4]
    text = f"the model has no {asked}"
    if nearest:
        text += f"; nearest are {', '.join(nearest)}"
    if children:
        shown = ", ".join(children[:8]) + (", …" if len(children) > 8 else "")
        text += f"; {path or 'the model'} ({type(station.module).__name__}) has {shown}"
    return text


def module_of(value: Any) -> Any:
    """The module that a view stands for; any other value as it is."""
    return value._station.module if isinstance(value, ModuleView) else value
