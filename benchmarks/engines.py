"""The two sides of a comparison: plain vLLM and endoscope, built alike, each ended whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks import workload
from endoscope import VLLM

IDLE = 0.05
"""Up to this share of one core, an engine counts as idle: vLLM's processes look now and then for work."""

SAMPLE = 0.4
"""Seconds over which the share is measured; the kernel counts it in hundredths."""

ATTEMPTS = 50

BUSY = "an engine that nothing is asked of keeps its processor busy, so it would disturb the other's runs"


@contextmanager
def plain(name: str, **options: Any) -> Iterator[Any]:
    """Plain vLLM, synchronous: a ``vllm.LLM`` in an engine process of its own; with other engine arguments, if any."""
    from vllm import LLM

    llm = LLM(model=workload.path(name), **{**workload.options(name), **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@contextmanager
def ours(name: str, **options: Any) -> Iterator[VLLM]:
    """Our engine, synchronous, started; with other engine arguments, if any."""
    with VLLM(workload.path(name), **{**workload.options(name), **options}) as model:
        yield model.start()


@asynccontextmanager
async def plain_async(name: str) -> AsyncIterator[Any]:
    """Plain vLLM, asynchronous: an ``AsyncLLM``."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=workload.path(name), **workload.options(name)))
    try:
        yield llm
    finally:
        llm.shutdown()


@asynccontextmanager
async def ours_async(name: str, **options: Any) -> AsyncIterator[VLLM]:
    """Our engine, asynchronous, started; with more engine arguments, if any."""
    async with VLLM(workload.path(name), mode="async", **workload.options(name), **options) as model:
        yield model.start()


def rest() -> None:
    """Wait until every engine process is idle.

    vLLM's workers go on polling for their next step for about a second behind the last one, and so would take a core
    from the run of the other engine.

    Raises:
        RuntimeError: they do not come to rest.
    """
    for _ in range(ATTEMPTS):
        before = _processor_time()
        time.sleep(SAMPLE)
        if _processor_time() - before <= IDLE * SAMPLE:
            return
    raise RuntimeError(BUSY)


async def rest_async() -> None:
    """Do what :func:`rest` does, for engines whose client side lives in the running event loop.

    Raises:
        RuntimeError: they do not come to rest.
    """
    for _ in range(ATTEMPTS):
        before = _processor_time()
        await asyncio.sleep(SAMPLE)
        if _processor_time() - before <= IDLE * SAMPLE:
            return
    raise RuntimeError(BUSY)


def _processor_time() -> float:
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return float(sum(time.user + time.system for time in times))
