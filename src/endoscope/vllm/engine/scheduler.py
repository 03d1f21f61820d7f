"""vLLM's scheduler, with what traces need of it.

Traced prompts are taken whole, and do not starve for it. Requests whose blocks may edit are preempted last, since what
they have changed would be lost. Requests end with their blocks where these say so.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from endoscope.vllm import internals
from endoscope.vllm.engine.gears import Gear

PATIENCE = 4
"""For so many steps, a traced prompt at the head of the queue lets running requests have the budget that it needs."""


class _Traces:
    """Mixed into vLLM's scheduler, in front of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        internals.whole_prompts(self)
        self._traced: set[str] = set()
        """The traced requests, waiting and running."""
        self._late: Any = None
        """A traced prompt that has been patient for long enough."""
        self._gears: dict[str, Counter[str]] = {}
        """In which gears the steps of traced requests ran, all sequences of one together."""
        self._left: Counter[str] = Counter()
        """How many sequences each of them has that have not ended."""
        self._ended: dict[str, dict[str, int]] = {}
        """The same of sequences that have ended in this step."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, as vLLM does; a traced prompt that has waited too long gets its budget first."""
        if not self._traced:
            self._late = None
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        aside, first = self._not_yet(), self._late
        self._late = None
        if first is not None and internals.could_start(self, first):
            aside |= internals.too_many(self, first, aside)
        else:
            first = None
        if aside or first is not None:
            with internals.step_without(self, aside, first):
                output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        else:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._welcome(internals.joined(self, output))
        self._count_waiting(output, first)
        return output

    def add_request(self, request: Any) -> None:
        """Take in a request, as vLLM does."""
        if internals.is_traced(request) and request.request_id not in self._traced:
            self._traced.add(request.request_id)
            family = internals.family(request.request_id)
            self._gears.setdefault(family, Counter())
            self._left[family] += 1
        super().add_request(request)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if request.request_id in self._traced:
            self._traced.discard(request.request_id)
            self._count_out(request.request_id)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _count_out(self, request: str) -> None:
        """A traced sequence has ended."""
        family = internals.family(request)
        self._ended[request] = dict.fromkeys(map(str, Gear), 0) | self._gears[family]
        self._left[family] -= 1
        if not self._left[family]:
            del self._gears[family], self._left[family]

    def _not_yet(self) -> set[Any]:
        """Running requests that cannot be in the step."""
        return set()

    def _welcome(self, requests: list[Any]) -> None:
        """Traced requests are in their first step, or in their first one after a preemption."""
        editing = [request for request in requests if internals.may_edit(request)]
        if editing:
            internals.spare(self, editing)

    def _count_waiting(self, output: Any, tried: Any) -> None:
        head = internals.head(self)
        if head is None or not internals.unseen(head) or not internals.lacks_budget(self, head, output):
            return
        head.endoscope_waited = 0 if head is tried else getattr(head, "endoscope_waited", 0) + 1
        if head.endoscope_waited >= PATIENCE:
            # It keeps its turn, whatever comes in before it meanwhile.
            self._late = head

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        internals.spare_no_more(request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in what a step made, as vLLM does, and end the requests that their blocks have ended in it."""
        over, _, gear = internals.marked(model_runner_output)
        self._ended.clear()
        if gear:
            for request in scheduler_output.num_scheduled_tokens:
                if request in self._traced:
                    self._gears[internals.family(request)][gear] += 1
        for request, token_counts in over.items():
            if not token_counts:
                internals.drop_token(model_runner_output, request)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if over:
            internals.end_requests(self, outputs, list(over))
        if self._ended:
            internals.put_gears(outputs, self._ended)
        return outputs


class Scheduler(_Traces, internals.scheduler_base()):  # type: ignore[misc]
    """Takes the place of vLLM's scheduler."""


class AsyncScheduler(_Traces, internals.async_scheduler_base()):  # type: ignore[misc]
    """Takes the place of vLLM's scheduler that runs a step ahead.

    vLLM finds out that a token ends a request when the request's next step is already under way, and drops what that
    makes. A block would see that step, one more than there are tokens. So a request whose block still waits for steps,
    and that a token may end, is not in a step until its last token is known; all others run ahead as ever.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watched: dict[str, Any] = {}
        """Running requests whose blocks wait for steps, and that a token may end."""

    def _not_yet(self) -> set[Any]:
        return {request for request in self._watched.values() if request.num_output_placeholders > 0}

    def _welcome(self, requests: list[Any]) -> None:
        super()._welcome(requests)
        for request in requests:
            if internals.unseen(request) and internals.ends_by_token(request):
                self._watched[request.request_id] = request

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in what a step made; requests whose blocks have ended in it run ahead from now on."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for name in internals.marked(model_runner_output)[1]:
            self._watched.pop(name, None)
        return outputs

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._watched.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)


def make_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Scheduler | AsyncScheduler:
    """The scheduler that suits the engine's configuration; vLLM calls this where it would build its own."""
    kind = AsyncScheduler if internals.runs_ahead(vllm_config) else Scheduler
    return kind(vllm_config, *args, **kwargs)
