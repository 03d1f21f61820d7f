"""vLLM's V1 model runner, with the probes' turns in each step."""

from __future__ import annotations

from typing import Any

from endoscope.vllm import internals
from endoscope.vllm.engine.probes import EngineProbes


class TracedRunner:
    """Mixed into a model runner of vLLM, in front of it."""

    probes: EngineProbes

    def attach(self, reports: bool) -> None:
        """Begin to serve traces; the model is loaded."""
        self.probes = EngineProbes(internals.runner_model(self), lambda: internals.runner_tokenizer(self), reports)
        self._in_step = False
        self._grammar: Any = None
        internals.after_sampling(self, self._sampled)
        internals.own_adapters(self, self.probes.turn_of)

    def _update_states(self, scheduler_output: Any) -> Any:
        probes = self.probes
        probes.send()
        probes.finish(scheduler_output.finished_req_ids)
        for request, data, tokens in internals.new_submissions(scheduler_output):
            probes.admit(request, data, tokens)
        if probes:
            for request in internals.resumed(scheduler_output):
                probes.resumed(request)
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        self._in_step = bool(probes) and scheduler_output.total_num_scheduled_tokens > 0
        if self._in_step:
            self._scheduled = scheduler_output
        return result

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_step:
            rows = internals.rows(self, self._scheduled)
            self.probes.begin(rows, internals.token_rows(args, kwargs))
        return super()._model_forward(*args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self._in_step:
            # Before a grammar masks them: a block sees what the model computed, and cannot lift the mask.
            internals.change_logits(self, self.probes.logits)
            self._grammar = grammar_output
        output = super().sample_tokens(grammar_output, *args, **kwargs)  # type: ignore[misc]
        if self._in_step:
            self._in_step = False
            self._scheduled = self._grammar = None
            over, quiet = self.probes.end()
            if over or quiet:
                internals.mark(output, over, quiet)
        return output

    def _sampled(self, tokens: Any) -> Any:
        """The step's tokens, ``[requests]``, before anything is reported of them."""
        if not self._in_step:
            return tokens
        tokens = self.probes.samples(tokens[:, None].int())
        if self._grammar is not None:
            for request, token in internals.refused_tokens(self, self._grammar, tokens, self.probes.editing()):
                self.probes.refuse(request, token)
        return tokens[:, 0]
