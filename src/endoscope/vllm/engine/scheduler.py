"""vLLM's scheduler, with what traces need of it: whole prompts, and requests that end with their blocks."""

from __future__ import annotations

from typing import Any

from endoscope.vllm import internals


class _Whole:
    """Mixed into vLLM's scheduler, in front of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        internals.whole_prompts(self)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        over: dict[str, bool] = internals.taken_over(model_runner_output)
        for request, token_counts in over.items():
            if not token_counts:
                internals.drop_token(model_runner_output, request)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if over:
            internals.end_requests(self, outputs, list(over))
        return outputs


class Scheduler(_Whole, internals.scheduler_base()):  # type: ignore[misc]
    """Takes the place of vLLM's scheduler."""


class AsyncScheduler(_Whole, internals.async_scheduler_base()):  # type: ignore[misc]
    """Takes the place of vLLM's scheduler that runs a step ahead."""
