"""The worker that vLLM starts on each rank: its own, with a runner that serves traces."""

from __future__ import annotations

import gc
from multiprocessing import parent_process
from typing import Any

from endoscope.errors import EngineArgumentError
from endoscope.vllm import internals
from endoscope.vllm.engine.gears import Gear
from endoscope.vllm.engine.runner_v1 import TracedV1Runner
from endoscope.vllm.engine.runner_v2 import TracedV2Runner

YOUNG = 50_000
"""So many new objects set off a collection in the middle of a step."""


class Worker(internals.worker_base()):  # type: ignore[misc]
    """vLLM's worker for this platform; the client reaches its methods by remote calls."""

    def init_device(self) -> None:
        """Make the runner, as vLLM does, and let it serve traces."""
        super().init_device()
        runner = self.model_runner
        traced = {"v1": TracedV1Runner, "v2": TracedV2Runner}[internals.runner_kind(runner)]
        # The class of the runner is fixed inside of vLLM's worker, so the runner changes its class once it is made.
        runner.__class__ = type("TracedRunner", (traced, type(runner)), {})

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model; traces see the modules that it has then."""
        result = super().load_model(*args, **kwargs)
        try:
            self.model_runner.attach(reports=internals.reports(self))
        except EngineArgumentError as error:
            internals.refuse_start(str(error))
            raise
        return result

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Get ready for the first step; what there is by then is not looked at by the garbage collector any more.

        vLLM's worker for GPUs does so itself. Without it, a block that keeps thousands of tensors sets off
        collections of everything that was ever imported.
        """
        result = super().compile_or_warm_up_model(*args, **kwargs)
        self.model_runner.learn()
        if parent_process() is not None:
            gc.collect()
            gc.freeze()
            # What blocks keep is looked at when they end, and not over and over while it grows.
            gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
        return result

    def shutdown(self) -> None:
        """End, as vLLM's worker does, with the connections to the clients closed."""
        probes = getattr(getattr(self, "model_runner", None), "probes", None)
        if probes is not None and probes.outbox is not None:
            probes.outbox.close()
        super().shutdown()

    def endoscope_release(self, requests: list[str]) -> int:
        """End the blocks of requests, by vLLM's id or by the client's key; returns how many probes are left."""
        self.model_runner.probes.release(requests)
        return len(self.model_runner.probes.traced)

    def endoscope_missing(self, sequences: list[tuple[str, str, int, str]]) -> None:
        """Say of finished sequences that they had no block, unless they have one that will speak for itself.

        Each is vLLM's id, the key of the submission, the number of the sequence, and the address of the inbox.
        """
        for sequence in sequences:
            self.model_runner.probes.missing(*sequence)

    def endoscope_counts(self) -> dict[str, Any]:
        """What this rank holds for traces, the requests that its runner has, and its steps by gear."""
        probes = self.model_runner.probes
        gears = {gear.value: probes.gears.steps[gear] for gear in Gear}
        return {**probes.counts(), "requests": len(internals.held_requests(self.model_runner)), "gears": gears}

    def endoscope_tree(self) -> list[tuple[str, str]]:
        """Every module of the model: its path and the name of its class."""
        stations = self.model_runner.probes.handoffs.stations
        return [(path, type(station.module).__name__) for path, station in stations.items()]
