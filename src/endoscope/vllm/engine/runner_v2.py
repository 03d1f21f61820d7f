"""vLLM's V2 model runner, with the probes' turns in each step."""

from __future__ import annotations

import logging
from typing import Any

from endoscope.vllm import internals
from endoscope.vllm.engine.gears import Gear
from endoscope.vllm.engine.runner import TracedRunner

logger = logging.getLogger(__name__)


class TracedV2Runner(TracedRunner):
    """Mixed into vLLM's V2 runner, in front of it."""

    def attach(self, reports: bool) -> None:
        """Begin to serve traces; the model is loaded."""
        super().attach(reports)
        self._sampling = False
        self._as_python = False
        self._segments: dict[Any, Any] = {}
        """Second graphs of decode steps, which come by the taps, by what vLLM calls the first ones."""
        internals.after_logits(self, self._logits)

    # Graphs.

    def profile_cudagraph_memory(self) -> int:
        """The memory that graphs will take: those with taps are as large as those without."""
        memory: int = super().profile_cudagraph_memory()  # type: ignore[misc]
        return 2 * memory if self._taps else memory

    @property
    def _taps(self) -> bool:
        return bool(self.probes.gears.taps)

    def capture_model(self, *args: Any, profile_only: bool = False, **kwargs: Any) -> int:
        """Capture vLLM's graphs, and those of whole steps once more, in segments that break at taps."""
        size: int = super().capture_model(*args, profile_only=profile_only, **kwargs)  # type: ignore[misc]
        if self._taps and not profile_only:
            with internals.capturing_segments(self) as segments:
                more = super().capture_model(*args, profile_only=profile_only, **kwargs) if segments is not None else 0  # type: ignore[misc]
            self._segments = segments or {}
            if self._segments:
                logger.info("%d graphs with taps take %.2f GiB", len(self._segments), more / (1 << 30))
            size += more
        return size

    # A step.

    def finish_requests(self, scheduler_output: Any) -> None:
        self._arrive(scheduler_output)
        super().finish_requests(scheduler_output)  # type: ignore[misc]

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        if not dummy_run:
            self._choose(scheduler_output)
            internals.around_forward(self, self._before_forward, self._after_forward)
            internals.own_dispatch(self, self._graph_of)
        return super().gather_batch_req_state(scheduler_output, dummy_run)  # type: ignore[misc]

    def _graph_of(self, description: Any) -> Any:
        """The graph to run for a step for which vLLM would run this one: it, one with taps, or ``None``."""
        if not self._in_step or self.probes.gear is Gear.GRAPH:
            return description
        return description if self.probes.gear is Gear.SPLIT and description in self._segments else None

    def _before_forward(self, input_batch: Any) -> None:
        if self._in_step and self._begin(internals.rows_v2(input_batch), int(input_batch.num_tokens_after_padding)):
            assert self._python is not None
            self._as_python = True
            self._python.__enter__()

    def _after_forward(self) -> None:
        if self._as_python:
            assert self._python is not None
            self._as_python = False
            self._python.__exit__(None, None, None)

    def sample(self, hidden_states: Any, input_batch: Any, grammar_output: Any) -> Any:
        self._sampling, self._grammar = self._in_step, grammar_output
        return super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]

    def _logits(self, logits: Any) -> Any:
        """Logits that the model has computed; the step's are the first ones that sampling asks for."""
        if not self._sampling:
            return logits
        self._sampling = False
        return self.probes.logits(logits)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        if self._in_step:
            self._end(output)
        return output

    def run_segments(self, description: Any) -> Any:
        """The graph with taps that is to run in this step, if one is."""
        if self._in_step and self.probes.gear is Gear.SPLIT:
            return self._segments.get(description)
        return None
