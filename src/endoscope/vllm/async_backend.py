"""The asynchronous path: a trace is a stream of vLLM's outputs, with what its blocks saved on the finished ones."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any

from endoscope.errors import EngineClosedError, EventLoopError, UsageError
from endoscope.tracing.backend import Backend
from endoscope.vllm import internals
from endoscope.vllm.requests import PATIENCE, Request, every
from endoscope.vllm.sync_backend import first_of

if TYPE_CHECKING:
    from endoscope.tracing.tracer import Tracer
    from endoscope.vllm.model import VLLM


class AsyncVLLMBackend(Backend):
    """Submits a trace to an asynchronous engine when its ``with`` is left, and then is its stream.

    ``async for output in backend`` yields vLLM's ``RequestOutput`` for every step that the engine reports.
    Each has a dict ``saves``, which is empty on all but the finished one, and ``invoke``, the number of the
    trace's invoke that it belongs to. ``await backend`` drains the stream and returns the finished output, or,
    for a trace of invokes, the list of them in invoke order. A stream is consumed once.

    A stream that is left early, by ``aclose()``, ``break``, cancellation or by dropping it, aborts its requests.

    Args:
        model: the model, in mode ``"async"``.

    Example:
        >>> async def main():
        ...     with model.trace("The Eiffel Tower is in", max_tokens=5) as tracer:
        ...         logits = model.logits.save()
        ...     async for output in tracer.backend:
        ...         print(output.outputs[0].text)
        ...     return output.saves["logits"]
    """

    def __init__(self, model: VLLM) -> None:
        self.model = model
        self._stream: OutputStream | None = None
        self._where = ""
        self._taken = False
        self._several = False

    def __call__(self, tracer: Tracer) -> None:
        """Submit the trace's invokes.

        Raises:
            EventLoopError: without a running event loop, or in another one than the engine's.
            TraceError: if a prompt or a sampling argument is refused; nothing is submitted then.
        """
        if self._where:
            raise UsageError(f"this backend already runs the trace at {self._where}; a backend carries one trace")
        prompts = [(invoke.prompt, invoke.sampling, invoke.block) for invoke in tracer.invokes]
        self.submit(prompts, f"{tracer.file}:{tracer.line}", tracer.has_invokes)
        assert self._stream is not None
        # The tracer holds this backend, and must not be held by its own stream.
        self._stream.tracer = weakref.ref(tracer)

    def submit(self, prompts: list[tuple[Any, Any, Any]], where: str, several: bool) -> None:
        """Submit prompts, each with its sampling arguments and its block or ``None``."""
        self.model.start()
        self._stream = self.model.engine.stream(prompts, self.model.resolve)
        self._where, self._several = where, several

    def __aiter__(self) -> AsyncIterator[Any]:
        stream = self._take("iterated")
        return stream if stream is not None else _Nothing()

    def __await__(self) -> Generator[Any, None, Any]:
        stream = self._take("awaited")
        return self._drain(stream).__await__()

    async def _drain(self, stream: OutputStream | None) -> Any:
        if stream is None:
            return None
        finished: dict[int, Any] = {}
        try:
            async for output in stream:
                if output.finished:
                    finished[output.invoke] = output
        except BaseException as error:
            await stream.aclose()
            error.__traceback__ = getattr(error, "__endoscope_traceback__", error.__traceback__)
            raise
        outputs = [finished[index] for index in sorted(finished)]
        return outputs if self._several else outputs[0]

    def _take(self, how: str) -> OutputStream | None:
        stream, self._stream = self._stream, None
        if stream is None:
            where = f"of the trace at {self._where} " if self._where else ""
            reason = (
                "was consumed before: a stream can be iterated or awaited once, so keep what you need of its outputs"
                if self._where
                else "was never submitted: a trace is submitted when its with statement is left"
            )
            warnings.warn(f"the stream {where}is {how}, but it {reason}", RuntimeWarning, stacklevel=3)
        return stream

    async def aclose(self) -> None:
        """Abort what still runs and wait until the engine has freed it. Does nothing once the stream is taken."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.aclose()


class _Nothing:
    """A stream that has ended."""

    def __aiter__(self) -> _Nothing:
        return self

    async def __anext__(self) -> Any:
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Do nothing."""


class _Channel:
    """Outputs on their way from vLLM's output loop to the stream. It outlives the stream, which may be dropped."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.items: deque[tuple[int, Any]] = deque()
        self.waiter: asyncio.Future[None] | None = None

    def put(self, index: int, item: Any) -> None:
        self.items.append((index, item))
        self.wake()

    def wake(self) -> None:
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def changed(self, timeout: float | None = None) -> None:
        self.waiter = self.loop.create_future()
        if timeout is None:
            await self.waiter
        else:
            await asyncio.wait([self.waiter], timeout=timeout)


class _Queue:
    """What vLLM's output loop puts one request's outputs into; every step's is kept."""

    def __init__(self, channel: _Channel, index: int) -> None:
        self.channel = channel
        self.index = index

    def put(self, item: Any) -> None:
        """Take an output, or the error that ends them."""
        for completion in getattr(item, "outputs", ()):
            # vLLM goes on to append to the list that it has put on the output.
            completion.token_ids = list(completion.token_ids)
        self.channel.put(self.index, item)


def _nobody() -> None:
    return None


class OutputStream:
    """The outputs of a trace's requests as they come. Dropping it aborts the requests that still run."""

    def __init__(self, engine: AsyncEngine, requests: list[Request], resolve: Callable[[tuple[str, ...]], Any]) -> None:
        self._engine = engine
        self._requests = requests
        self._resolve = resolve
        self._open = {request.index: request for request in requests}
        self._errors: list[BaseException] = []
        self._waiting = False
        self.tracer: Callable[[], Tracer | None] = _nobody
        self._channel = channel = _Channel(engine.loop)
        self._started: list[asyncio.Task[None]] = []
        for request in requests:
            if request.arrival is not None:
                request.arrival.wake = channel.wake
            try:
                request.register(engine.llm, _Queue(channel, request.index))
                for child in request.children:
                    self._start(internals.send(engine.llm, child))
            except BaseException:
                self._release()
                raise

    def _start(self, sending: Coroutine[Any, Any, None]) -> None:
        task = started(sending, self._engine.loop)
        if task is not None:
            self._started.append(task)

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Any:
        if self._waiting:
            raise UsageError("the stream is already being waited for: one task at a time can iterate over it")
        self._waiting = True
        try:
            return await self._next()
        except StopAsyncIteration:
            raise
        except BaseException as error:
            # Cancelled, or the end of the trace: nobody will ask for more.
            trace = getattr(error, "__endoscope_traceback__", error.__traceback__)
            self._release()
            error.__traceback__ = trace
            raise
        finally:
            self._waiting = False

    async def _next(self) -> Any:
        channel = self._channel
        while self._open:
            while not channel.items:
                await channel.changed()
            index, output = channel.items[0]
            if isinstance(output, BaseException):
                raise output
            request = self._open.get(index)
            if request is None:
                channel.items.popleft()
                continue
            if output.finished:
                since = self._engine.loop.time()
                while not request.ready:
                    if internals.dead(self._engine.llm):
                        raise internals.dead_error()
                    await channel.changed(timeout=0.5)
                    self._engine.inbox.drain()
                    if self._engine.loop.time() - since > PATIENCE and (missing := request.missing()):
                        await self._engine.call("endoscope_missing", missing)
                channel.items.popleft()
                del self._open[index]
                request.output = request.label(output, self._resolve)
                request.collect(self._resolve)
                if not self._open and (tracer := self.tracer()) is not None:
                    results = [request.output for request in self._requests]
                    tracer.result = results if tracer.has_invokes else results[0]
                if request.error is not None:
                    self._errors.append(request.error)
                    continue
                return output
            channel.items.popleft()
            self._engine.inbox.drain()
            return request.label(output, self._resolve)
        if self._errors:
            errors, self._errors = self._errors, []
            error = first_of(errors)
            error.outputs = [request.output for request in self._requests]  # type: ignore[attr-defined]
            raise error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Abort what still runs, and wait until the engine has freed it on every rank."""
        releasing = self._release()
        if releasing is not None:
            await asyncio.shield(releasing)

    def _release(self) -> asyncio.Task[None] | None:
        left, self._open = list(self._open.values()), {}
        self._channel.items.clear()
        for request in left:
            request.forget()
        return self._engine.release(every(left)) if left else None

    def __del__(self) -> None:
        if getattr(self, "_open", None):
            loop = self._engine.loop
            left, self._open = list(self._open.values()), {}
            for request in left:
                request.forget()
            names, engine = every(left), self._engine
            if not loop.is_closed():
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(engine.release, names)


class AsyncEngine:
    """A ``vllm.v1.engine.async_llm.AsyncLLM``, the event loop that it lives in, and its inbox.

    Args:
        llm: the engine.
        inbox: where blocks send to.
        loop: the running event loop.
    """

    def __init__(self, llm: Any, inbox: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.llm = llm
        self.inbox = inbox
        self.loop = loop
        self._tasks: set[asyncio.Task[None]] = set()
        self.closed = False
        inbox.watch(loop)

    def check_loop(self) -> None:
        """Refuse to be used from another event loop.

        Raises:
            EventLoopError: if no event loop runs here, or another one.
        """
        check_loop(self.loop)

    def stream(self, prompts: list[tuple[Any, Any, Any]], resolve: Callable[[tuple[str, ...]], Any]) -> OutputStream:
        """Submit prompts, each with its sampling arguments and its block or ``None``; returns their outputs."""
        self.check_loop()
        requests: list[Request] = []
        try:
            for index, (prompt, sampling, block) in enumerate(prompts):
                requests.append(Request(self.llm, self.inbox, index, prompt, sampling, block))
        except BaseException:
            for request in requests:
                request.forget()
            raise
        return OutputStream(self, requests, resolve)

    def release(self, names: list[str]) -> asyncio.Task[None] | None:
        """Abort requests and end their blocks, in a task of its own that no cancellation reaches."""
        if self.closed or internals.dead(self.llm):
            return None
        task = self.loop.create_task(self._release(names))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _release(self, names: list[str]) -> None:
        with contextlib.suppress(type(internals.dead_error())):
            await internals.abort(self.llm, names)
            await self.call("endoscope_release", names)

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank's worker.

        Raises:
            EngineDeadError: if the engine dies meanwhile; vLLM itself would wait for ever.
        """
        self.check_loop()
        calling = asyncio.ensure_future(self.llm.collective_rpc(method, args=args))
        try:
            while not (await asyncio.wait([calling], timeout=0.5))[0]:
                if internals.dead(self.llm):
                    raise internals.dead_error()
            return calling.result()  # type: ignore[no-any-return]
        finally:
            calling.cancel()

    def close(self) -> None:
        """End every process of the engine."""
        self.closed = True
        if not self.loop.is_closed():
            error = EngineClosedError("the model was closed while a stream of it was waited for")
            self.loop.call_soon_threadsafe(internals.wake_all, self.llm, error)
        internals.shut_down(self.llm)
        self.inbox.close()


def check_loop(own: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop:
    """The running event loop, which has to be the engine's own if there is one.

    Raises:
        EventLoopError: if it is not, or if none runs.
    """
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        raise EventLoopError(
            'mode="async" needs a running event loop: write the trace in a coroutine (async def) that asyncio.run '
            'runs, or in a notebook cell; or use mode="sync"'
        ) from None
    if own is not None and running is not own:
        state = "closed" if own.is_closed() else "another one"
        raise EventLoopError(
            f"this engine was started in an event loop that is {state}, and it is used from a new one. An asynchronous "
            f"engine lives in the loop of its first trace: keep to that loop, or build a VLLM for each loop"
        )
    return running


def started(coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> asyncio.Task[None] | None:
    """Run a coroutine up to its first wait at once; the rest of it, if any, is a task."""
    try:
        waited = coroutine.send(None)
    except StopIteration:
        return None

    class Rest:
        def __await__(self) -> Generator[Any, None, None]:
            yield waited
            yield from coroutine.__await__()

    async def rest() -> None:
        await Rest()

    return loop.create_task(rest())
