"""vLLM's V1 model runner, with the probes' turns in each step."""

from __future__ import annotations

from typing import Any

from endoscope.vllm import internals
from endoscope.vllm.engine.gears import Gear
from endoscope.vllm.engine.runner import TracedRunner


class TracedV1Runner(TracedRunner):
    """Mixed into vLLM's V1 runner, in front of it."""

    def attach(self, reports: bool) -> None:
        """Begin to serve traces; the model is loaded."""
        super().attach(reports)
        internals.own_adapters(self, self.probes.turn_of)

    def _update_states(self, scheduler_output: Any) -> Any:
        self._arrive(scheduler_output)
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        if scheduler_output.total_num_scheduled_tokens > 0:
            self._choose(scheduler_output)
            self._scheduled = scheduler_output
        return result

    def _determine_batch_execution_and_padding(self, *args: Any, **kwargs: Any) -> Any:
        # No graph for a step in which somebody has to come by between its parts.
        if self._in_step and self.probes.gear is not Gear.GRAPH:
            kwargs["force_eager"] = True
        return super()._determine_batch_execution_and_padding(*args, **kwargs)  # type: ignore[misc]

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_step and self._begin(internals.rows(self, self._scheduled), internals.token_rows(args, kwargs)):
            assert self._python is not None
            with self._python:
                return super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        return super()._model_forward(*args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._in_step:
            # Before a grammar masks them: a block sees what the model computed, and cannot lift the mask.
            internals.change_logits(self, self.probes.logits)
            self._grammar = grammar_output
        output = super().sample_tokens(grammar_output, *args, **kwargs)  # type: ignore[misc]
        if self._in_step:
            self._end(output)
        return output
