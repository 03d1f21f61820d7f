"""Runs blocks in this process, in place of an engine, and programs in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from endoscope.tracing import Backend, Invoke, Tracer
from endoscope.tracing.serialize import loads
from endoscope.tracing.tracer import NOTHING

SRC = str(Path(__file__).parents[2] / "src")
HERE = str(Path(__file__).parent)


class FakeBackend(Backend):
    """Runs every block here, on values that have been through their bytes, and binds what it bound."""

    def __init__(self, resolve: dict[tuple[str, ...], Any] | None = None, write: bool = True) -> None:
        self.resolve = resolve or {}
        self.write = write
        self.namespaces: list[dict[str, Any]] = []
        self.saved: list[tuple[str, Any]] = []
        self.tracer: Tracer | None = None

    def __call__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        for invoke in tracer.invokes:
            namespace = self.run(tracer, invoke)
            if self.write:
                tracer.bind({name: namespace[name] for name in invoke.block.binds if name in namespace}, invoke)

    def run(self, tracer: Tracer, invoke: Invoke) -> dict[str, Any]:
        def save(value: Any, text: str, names: tuple[str, ...]) -> Any:
            self.saved.append((text, value))
            return value

        keys = {("tracer",): tracer, **self.resolve}
        namespace = loads(invoke.block.values, keys.__getitem__)
        self.namespaces.append(namespace)
        namespace["__endoscope_save__"] = save
        namespace["__endoscope_output__"] = output
        exec(invoke.block.code.compile(), namespace)
        return namespace


def output(owner: Any, item: int) -> Any:
    return owner.output[item]


class NoBackend(Backend):
    """Takes the trace and does nothing."""

    tracer: Tracer | None = None

    def __call__(self, tracer: Tracer) -> None:
        self.tracer = tracer


def trace(prompt: Any = NOTHING, backend: Backend | None = None, **sampling: Any) -> Tracer:
    """Return a trace as a model would."""
    return Tracer(backend or FakeBackend(), prompt, sampling)


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which a child finds the package and this file."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([SRC, HERE]), "PYTHONWARNINGS": "default", **more}


def python(*arguments: str, stdin: str = "", cwd: Path | None = None, **env: str) -> str:
    """Run this Python with the arguments; return what it printed, errors included."""
    done = subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        cwd=cwd,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    return done.stdout


def program(folder: Path, text: str, name: str = "program.py") -> Path:
    """Write a program to a file."""
    path = folder / name
    path.write_text("from tracing_support import trace\n" + textwrap.dedent(text))
    return path
