"""A model runner of vLLM's, with the probes' turns in each step: what both of its runners have in common."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from endoscope.vllm import internals
from endoscope.vllm.engine.gears import Gear
from endoscope.vllm.engine.probes import EngineProbes, Rows

logger = logging.getLogger(__name__)

LEARNED = 5
"""So many rows has the pass in which the order of the modules is learned."""


class TracedRunner:
    """Mixed into a model runner of vLLM, in front of it.

    In each step: :meth:`_arrive`, :meth:`_choose`, :meth:`_begin`, the model's pass, the logits, :meth:`_sampled`,
    :meth:`_end`.
    """

    probes: EngineProbes

    def attach(self, reports: bool) -> None:
        """Begin to serve traces; the model is loaded."""
        model, taps = internals.runner_model(self), internals.taps_of(self)
        self.probes = EngineProbes(model, lambda: internals.runner_tokenizer(self), reports, taps)
        self._python = internals.PythonPass(self) if taps is not None else None
        self._in_step = False
        self._order: list[str] = []
        self._grammar: Any = None
        internals.after_sampling(self, self._sampled)

    def learn(self) -> None:
        """Learn in which order the modules run, so that no request's step has to run as Python for it."""
        if self._python is None or self.probes.handoffs.wrappers.recorded:
            return
        internals.compile_now(self)
        try:
            with self.probes.handoffs.learning(LEARNED):
                internals.run_python(self, self._python, LEARNED)
        except Exception as error:
            logger.warning("the order of the modules is learned with the first block that needs it: %s", error)

    def _arrive(self, scheduler_output: Any) -> None:
        """What has ended goes, and what is new comes in."""
        probes = self.probes
        probes.send()
        probes.finish(scheduler_output.finished_req_ids)
        for request, data, tokens in internals.new_submissions(scheduler_output):
            probes.admit(request, data, tokens)
        if probes:
            for request in internals.resumed(scheduler_output):
                probes.resumed(request)

    def _choose(self, scheduler_output: Any) -> None:
        """A step is to run: choose its gear."""
        self._in_step = bool(self.probes)
        self.probes.gears.steps[self.probes.choose(scheduler_output.num_scheduled_tokens)] += 1

    def _begin(self, rows: Sequence[Rows], tokens: int) -> bool:
        """The model is about to run; whether it has to run as Python."""
        self._order = [row.request for row in rows]
        self.probes.begin(rows, tokens)
        return self._python is not None and self.probes.gear is Gear.EAGER

    def _sampled(self, tokens: Any) -> Any:
        """The step's tokens, ``[requests]``, before anything is reported of them."""
        if not self._in_step:
            return tokens
        changed = self.probes.samples(tokens[:, None].int())
        if self._grammar is not None:
            editing = self.probes.editing()
            for request, token in internals.refused_tokens(self._order, self._grammar, changed, editing):
                self.probes.refuse(request, token)
        return changed[:, 0].to(tokens.dtype)

    def _end(self, output: Any) -> None:
        """The step's tokens are sampled."""
        self._in_step = False
        self._grammar = None
        over, quiet = self.probes.end()
        internals.mark(output, over, quiet, self.probes.gear.value)
