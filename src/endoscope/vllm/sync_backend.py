"""The synchronous path: a trace runs on ``vllm.LLM`` and is done when its ``with`` is left."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from endoscope.tracing.backend import Backend
from endoscope.vllm import internals
from endoscope.vllm.requests import PATIENCE, Request, every, merge

if TYPE_CHECKING:
    from endoscope.tracing.tracer import Tracer
    from endoscope.vllm.model import VLLM


class VLLMBackend(Backend):
    """Runs a trace on a synchronous engine and binds what it saved where it was written.

    Called with the tracer when its ``with`` is left, it returns when every request is done.

    Args:
        model: the model, in mode ``"sync"``.
    """

    def __init__(self, model: VLLM) -> None:
        self.model = model

    def __call__(self, tracer: Tracer) -> None:
        """Run the trace's invokes as one batch.

        Raises:
            TraceError: if a prompt or a sampling argument is refused; nothing is submitted then.
            Exception: what a block raised, as a class that is also ``BlockError``, when all requests are done.
        """
        self.model.start()
        prompts = [(invoke.prompt, invoke.sampling, invoke.block) for invoke in tracer.invokes]
        requests = self.model.engine.run(prompts, self.model.resolve)
        outputs = [request.output for request in requests]
        tracer.result = outputs if tracer.has_invokes else outputs[0]
        tracer.saves = merge([request.saves for request in requests])
        tracer.bind(tracer.saves)
        errors = [request.error for request in requests if request.error is not None]
        if errors:
            raise first_of(errors)


def first_of(errors: list[BaseException]) -> BaseException:
    """The first block's error, with a note of the others."""
    first, *others = errors
    for other in others:
        first.add_note(f"another block of the trace failed too: {type(other).__name__}: {other}")
    return first


class SyncEngine:
    """A ``vllm.LLM`` and the inbox that its blocks send to.

    Args:
        llm: the engine.
        inbox: where blocks send to.
    """

    def __init__(self, llm: Any, inbox: Any) -> None:
        self.llm = llm
        self.inbox = inbox
        self._lock = threading.Lock()

    def run(self, prompts: list[tuple[Any, Any, Any]], resolve: Callable[[tuple[str, ...]], Any]) -> list[Request]:
        """Run prompts, each with its sampling arguments and its block or ``None``, until all of them are done."""
        requests: list[Request] = []
        try:
            for index, (prompt, sampling, block) in enumerate(prompts):
                requests.append(Request(self.llm, self.inbox, index, prompt, sampling, block, final_only=True))
        except BaseException:
            for request in requests:
                request.forget()
            raise
        with self._lock:
            self._run(requests, resolve)
        return requests

    def _run(self, requests: list[Request], resolve: Callable[[tuple[str, ...]], Any]) -> None:
        """Submit requests and step the engine until all of them are done and their values have come home."""
        waiting: dict[str, Request] = {}
        submitted: list[Request] = []
        try:
            for request in requests:
                request.register(self.llm)
                submitted.append(request)
                waiting[request.made.request_id] = request
                for child in request.children:
                    internals.send(self.llm, child)
            by_external = {request.made.external_req_id: request for request in requests}
            left = len(requests)
            while left:
                for output in self.llm.llm_engine.step():
                    if output.finished:
                        by_external[output.request_id].output = output
                        left -= 1
                self.inbox.drain()
            # In the order in which they come home, so that one is read here while the engine still packs the next.
            away = list(requests)
            since = time.monotonic()
            while away:
                home = [request for request in away if request.ready]
                for request in home:
                    request.label(request.output, resolve)
                    request.collect(resolve)
                away = [request for request in away if request not in home]
                if away and not home:
                    self._wait()
                    late = away if time.monotonic() - since > PATIENCE else []
                    if missing := [sequence for request in late for sequence in request.missing()]:
                        self.call("endoscope_missing", missing)
            if internals.in_process():
                # The engine learns in its next step that the requests are over, and nobody else makes one.
                self.llm.llm_engine.step()
        except BaseException:
            for request in submitted:
                request.forget()
            if not internals.dead(self.llm):
                with contextlib.suppress(type(internals.dead_error())):
                    internals.abort(self.llm, every(submitted))
                    self.call("endoscope_release", every(submitted))
            raise

    def _wait(self) -> None:
        if internals.dead(self.llm):
            raise internals.dead_error()
        if internals.in_process():
            # A block that waits for a step that never comes is told of it in the engine's next step.
            self.llm.llm_engine.step()
            self.inbox.drain()
        else:
            self.inbox.drain(timeout=0.2)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank's worker.

        Raises:
            EngineDeadError: if the engine dies meanwhile; vLLM itself would wait for ever.
        """
        if internals.in_process():
            return self.llm.collective_rpc(method, args=args)  # type: ignore[no-any-return]
        calling: Future[list[Any]] = Future()

        def call() -> None:
            try:
                calling.set_result(self.llm.collective_rpc(method, args=args))
            except BaseException as error:
                calling.set_exception(error)

        threading.Thread(target=call, daemon=True).start()
        while True:
            with contextlib.suppress(TimeoutError):
                return calling.result(timeout=0.2)
            if internals.dead(self.llm):
                raise internals.dead_error()

    def close(self) -> None:
        """End every process of the engine."""
        internals.shut_down(self.llm)
        self.inbox.close()
