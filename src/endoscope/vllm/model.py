"""``VLLM``: a language model served by vLLM, and what can be said of its inside before a trace."""

from __future__ import annotations

import difflib
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from endoscope.errors import (
    BlockError,
    EngineArgumentError,
    EngineClosedError,
    EngineError,
    ModeError,
    ModelNotFoundError,
    SecondEngineError,
    SerializationError,
    UnknownModuleError,
    UsageError,
)
from endoscope.probing.limits import Limits
from endoscope.tracing.backend import Backend
from endoscope.tracing.serialize import Referenced
from endoscope.tracing.tracer import NOTHING, Tracer
from endoscope.vllm import internals
from endoscope.vllm.async_backend import AsyncEngine, AsyncVLLMBackend, check_loop
from endoscope.vllm.inbox import Inbox
from endoscope.vllm.sync_backend import SyncEngine, VLLMBackend


class ModuleReference(Referenced):
    """A module of the model, by its path: a name outside a block, the module itself inside one.

    Before the engine has started, any path is taken, and checked when a trace is submitted.
    """

    def __init__(self, model: VLLM, path: str) -> None:
        self._model = model
        self._path = path
        model._check_path(path)

    def reference(self) -> tuple[str, ...]:
        """The module travels as its path.

        Raises:
            SerializationError: if another model is being traced.
        """
        _check_traced(self._model)
        return ("module", self._path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _SITES:
            raise UsageError(
                f"{self._path}.{name} was read outside a block: it has a value only where the model runs, in the body "
                f"of `with model.trace(prompt):`"
            )
        return ModuleReference(self._model, f"{self._path}.{name}")

    def __getitem__(self, index: int | slice | str) -> Any:
        if isinstance(index, int) and index >= 0:
            return ModuleReference(self._model, f"{self._path}.{index}")
        if isinstance(index, str):
            return ModuleReference(self._model, f"{self._path}.{index}")
        return [*self][index]

    def __iter__(self) -> Iterator[ModuleReference]:
        return iter([ModuleReference(self._model, path) for path in self._model._children(self._path)])

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._model._children(self._path))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleReference) and (self._model, self._path) == (other._model, other._path)

    def __hash__(self) -> int:
        return hash((id(self._model), self._path))

    def __repr__(self) -> str:
        return f"<module {self._path}>"


_SITES = ("output", "input", "inputs", "resid_pre", "resid_post", "skip")


class VLLM(Referenced):
    """A language model on vLLM whose inside can be read and changed while it runs.

    The engine starts with the first trace. Modules are named as in vLLM's own module tree
    (``model.model.layers[3].mlp``); ``print(model)`` shows it.

    Args:
        model: a model's directory, or its name on a hub.
        mode: ``"sync"`` runs a trace on ``vllm.LLM``, and its ``with`` returns when the requests are done;
            ``"async"`` runs it on ``AsyncLLM``, and the trace is a stream (``tracer.backend``).
        taps: outputs of modules at which compiled code can hand over to blocks, so that a step in which blocks ask for
            nothing else keeps its compiled code: shell-style patterns of paths such as
            ``"model.layers.*.mlp.output"``. ``"auto"`` stands for the output of every decoder layer, ``()`` for none.
            What is no tap can be read and changed as well; the step then runs without compiled code.
        step_timeout: seconds that a block may take from one handoff to the next before it is interrupted with a
            :class:`StepTimeoutError`; 30 by default. One call of native code that does not return is not interrupted.
        save_limit: bytes that a block may keep for the end of its request, and may emit at once; 2 GiB by default. One
            that keeps more gets a :class:`SaveLimitError`. The environment variables ``ENDOSCOPE_STEP_TIMEOUT`` and
            ``ENDOSCOPE_SAVE_LIMIT`` give other defaults.
        **options: any argument of vLLM's engine, such as ``dtype``, ``max_model_len``, ``kv_cache_memory_bytes``.

    Raises:
        ModeError: for another mode.
        EngineArgumentError: for a limit that is not a positive number; for taps that are no patterns, and at the first
            trace for those that fit no module.
        ModelNotFoundError: for a path that does not exist; for a name that no hub knows, at the first trace.

    Example:
        >>> with model.trace("The Eiffel Tower is in", max_tokens=5) as tracer:
        ...     logits = model.logits.save()
        >>> logits.shape
        torch.Size([1, 49152])
    """

    def __init__(
        self,
        model: str,
        *,
        mode: Literal["sync", "async"] = "sync",
        taps: str | Iterable[str] = "auto",
        step_timeout: float | None = None,
        save_limit: int | None = None,
        **options: Any,
    ) -> None:
        if mode not in ("sync", "async"):
            near = difflib.get_close_matches(str(mode), ("sync", "async"), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ModeError(f'mode is "sync" or "async", not {mode!r}{hint}')
        self._name = os.fspath(model)
        self._mode = mode
        self._options = dict(options)
        self._taps = _check_taps(taps)
        self._limits = Limits.given(step_timeout, save_limit)
        self._engine: SyncEngine | AsyncEngine | None = None
        self._finalizer: Any = None
        self._closed = False
        self._lock = threading.RLock()
        self._loaded_tokenizer: Any = None
        self._modules: dict[str, str] | None = None
        _check_directory(self._name)

    # Tracing.

    def trace(self, prompt: Any = NOTHING, *, backend: Backend | None = None, **sampling: Any) -> Tracer:
        """A trace, to be used in a ``with`` statement.

        Args:
            prompt: text, token ids, what a tokenizer returns, or vLLM's dict of one of them. The body of the
                ``with`` is then the block for it. Without a prompt, the body holds one
                ``with tracer.invoke(prompt):`` for each request.
            backend: what carries the trace; by default the one of the model's mode.
            **sampling: fields of vLLM's ``SamplingParams``, or ``sampling_params`` with one of them;
                ``lora_request`` and ``priority`` of the request.

        Returns:
            The tracer.
        """
        chosen = backend or (VLLMBackend(self) if self._mode == "sync" else AsyncVLLMBackend(self))
        return Tracer(chosen, prompt, sampling, self._references)

    def generate(self, prompts: Any, **sampling: Any) -> Any:
        """Run prompts without a block.

        Args:
            prompts: one prompt, or a list of them.
            **sampling: as for :meth:`trace`.

        Returns:
            The list of finished ``RequestOutput`` in the order of the prompts, in mode ``"sync"``; in mode
            ``"async"`` an :class:`AsyncVLLMBackend`, to be iterated, or awaited for that list.
        """
        one = isinstance(prompts, (str, Mapping)) or (
            isinstance(prompts, (list, tuple)) and bool(prompts) and isinstance(prompts[0], int)
        )
        several = [prompts] if one else list(prompts)
        if self._mode == "async":
            backend = AsyncVLLMBackend(self)
            backend.submit([(prompt, sampling, None) for prompt in several], "generate()", several=True)
            return backend
        self.start()
        requests = self.engine.run([(prompt, sampling, None) for prompt in several], self.resolve)
        return [request.output for request in requests]

    # The engine.

    @property
    def engine(self) -> Any:
        """The engine behind the model; it is started if it has not been.

        Raises:
            EngineClosedError: if the model was closed.
            EventLoopError: in mode ``"async"`` without a running event loop.
            ModelNotFoundError, EngineArgumentError, UnsupportedError, VersionError, SecondEngineError: if it
                cannot be built.
        """
        self.start()
        return self._engine

    def start(self) -> VLLM:
        """Start the engine now instead of with the first trace; returns the model."""
        with self._lock:
            if self._closed:
                raise EngineClosedError(f"{self!r} was closed; build another VLLM for more traces")
            if self._engine is None:
                # No name for the engine here: vLLM's modules keep the frames of their import, and so their names.
                self._engine = self._start()
                self._finalizer = weakref.finalize(self, self._engine.close)
        return self

    def _start(self) -> SyncEngine | AsyncEngine:
        internals.check_version()
        asynchronous = self._mode == "async"
        loop = check_loop(None) if asynchronous else None
        arguments = internals.engine_arguments(self._name, self._options, asynchronous, self._taps)
        global _in_process
        alone = not asynchronous and internals.in_process()
        if alone and (other := _in_process and _in_process()) is not None and not other._closed:
            raise SecondEngineError(
                f"VLLM_ENABLE_V1_MULTIPROCESSING=0 runs the engine in this process, and vLLM can have one there: "
                f"{other!r} is it. Close that one first, or leave the variable unset"
            )
        with internals.starting(self._name, arguments), self._limits.in_environment():
            engine: SyncEngine | AsyncEngine
            # No name for vLLM's engine here: exceptions that vLLM keeps hold this frame, and would hold the engine.
            if loop is None:
                engine = SyncEngine(internals.build_sync(arguments), Inbox())
            else:
                engine = AsyncEngine(internals.build_async(arguments), Inbox(), loop)
        if alone:
            _in_process = weakref.ref(self)
        try:
            internals.check_config(engine.llm)
            return engine
        except BaseException:
            engine.close()
            raise
        finally:
            del engine

    def close(self) -> None:
        """End every process that the model has started. A closed model does not start again."""
        self._closed = True
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = self._engine = None

    def __enter__(self) -> VLLM:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    async def __aenter__(self) -> VLLM:
        return self

    async def __aexit__(self, *_: Any) -> None:
        self.close()

    def debug(self) -> Any:
        """What the engine holds for traces, summed over its ranks.

        Returns:
            A dict of counts: ``probes`` (blocks that run or wait), ``requests`` (that the ranks hold state
            for), ``hooks`` (modules that are wrapped) and ``bytes`` (of tensors that blocks keep); and under
            ``gears``, how many steps the first rank has run in each gear since the engine was started:
            ``graph``, ``split`` and ``eager``. In mode ``"async"`` a coroutine that returns it.
        """
        if self._mode == "sync":
            return _sum(self.engine.call("endoscope_counts"))

        async def counted() -> dict[str, Any]:
            return _sum(await self.engine.call("endoscope_counts"))

        return counted()

    # What blocks refer to.

    def reference(self) -> tuple[str, ...]:
        """The model travels as a reference to the engine's own.

        Raises:
            SerializationError: if another model is being traced.
        """
        _check_traced(self)
        return ("model",)

    def resolve(self, key: tuple[str, ...]) -> Any:
        """What a reference that comes home stands for."""
        match key:
            case ("model",):
                return self
            case ("module", path):
                return ModuleReference(self, path)
            case ("tokenizer",):
                return self.tokenizer
        raise BlockError(f"a block saved its {key[0]}, which means nothing outside of it")

    def _references(self) -> Mapping[int, tuple[str, ...]]:
        # Asked just before a block of a trace of this model is read, on the same thread.
        _traced.model = self
        known = self._loaded_tokenizer
        return {} if known is None else {id(known): ("tokenizer",)}

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Inside a block it is the engine's."""
        if self._loaded_tokenizer is None:
            if self._engine is not None:
                self._loaded_tokenizer = internals.tokenizer(self._engine.llm)
            else:
                internals.check_version()
                self._loaded_tokenizer = internals.load_tokenizer(self._name, self._options)
        return self._loaded_tokenizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in ("logits", "samples", *_SITES):
            raise UsageError(
                f"model.{name} was read outside a block: it has a value only where the model runs, in the body of "
                f"`with model.trace(prompt):`"
            )
        return ModuleReference(self, name)

    def _check_path(self, path: str) -> None:
        modules = self._modules
        if modules is None or path in modules:
            return
        name = path.rpartition(".")[2]
        near = difflib.get_close_matches(path, modules, n=3)
        near += sorted((p for p in modules if p.rpartition(".")[2] == name), key=len)[:3]
        hint = f"; nearest are {', '.join(dict.fromkeys(near))}" if near else ""
        raise UnknownModuleError(f"the model has no {path}{hint}")

    def _children(self, path: str) -> list[str]:
        prefix = f"{path}." if path else ""
        return [p for p in self._tree() if p.startswith(prefix) and p != path and "." not in p[len(prefix) :]]

    def _tree(self) -> dict[str, str]:
        if self._modules is None:
            if self._mode == "async":
                raise UsageError(
                    "the module tree was asked for before the engine has told it: `await model.modules()` first, or go "
                    "over the modules inside a block"
                )
            self._modules = dict(self.engine.call("endoscope_tree")[0])
        return self._modules

    def modules(self) -> Any:
        """The model's modules as the engine has them.

        Returns:
            A dict from path to the name of the module's class. In mode ``"async"`` a coroutine that returns it.
        """
        if self._mode == "sync":
            return dict(self._tree())

        async def asked() -> dict[str, str]:
            if self._modules is None:
                self._modules = dict((await self.engine.call("endoscope_tree"))[0])
            return dict(self._modules)

        return asked()

    def __repr__(self) -> str:
        return f"VLLM({self._name!r}, mode={self._mode!r})"

    def __str__(self) -> str:
        if self._modules is None:
            return repr(self)
        lines = [repr(self)]
        for path, kind in self._modules.items():
            if path:
                lines.append("  " * (path.count(".") + 1) + f"{path.rpartition('.')[2]}: {kind}")
        return "\n".join(lines)


_traced = threading.local()
"""``model``: the model whose block is being read on this thread."""


def _check_traced(model: VLLM) -> None:
    traced = getattr(_traced, "model", model)
    if traced is not model:
        raise SerializationError(f"it belongs to {model!r}, and this is a trace of {traced!r}.")


_in_process: Any = None
"""The model whose engine runs in this process, if there is one."""


def _sum(counts: list[dict[str, Any]]) -> dict[str, Any]:
    *_, gears = [each.pop("gears") for each in counts]  # every rank runs the same steps
    return {**{name: sum(each[name] for each in counts) for name in counts[0]}, "gears": gears}


def _check_taps(taps: Any) -> str | list[str]:
    if taps == "auto":
        return "auto"
    chosen = None if isinstance(taps, str) or not isinstance(taps, Iterable) else list(taps)
    if chosen is None or not all(isinstance(each, str) for each in chosen):
        raise EngineArgumentError(
            f'taps is "auto", or a list of patterns of outputs such as ["model.layers.*.output"], not {taps!r}'
        )
    return chosen


def _check_directory(name: str) -> None:
    """Refuse what is plainly the path of a directory, and is none."""
    looks = os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1 or os.sep in name[:1]
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        if not os.path.exists(os.path.join(path, "config.json")):
            raise ModelNotFoundError(f"the directory {name!r} holds no model: it has no config.json")
    elif looks or not name:
        raise ModelNotFoundError(f"there is no directory {name!r} to load a model from")


__all__ = ["VLLM", "EngineError", "ModuleReference"]
