"""Whose a module is: part of an installation, which the engine has too, or the user's own."""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
from functools import lru_cache
from types import ModuleType

_OWN = "endoscope"


def is_users(name: str | None) -> bool:
    """Return whether the module of this name is the user's own code: a Python file outside of every installation."""
    module = sys.modules.get(name or "")
    filename = getattr(module, "__file__", None)
    return isinstance(filename, str) and name is not None and _is_users(name, filename)


@lru_cache(maxsize=4096)
def _is_users(name: str, filename: str) -> bool:
    if name.partition(".")[0] == _OWN or not filename.endswith((".py", ".pyc", ".ipynb")):
        return False
    path = os.path.realpath(filename)
    return not path.startswith(_installed())


@lru_cache(maxsize=1)
def _installed() -> tuple[str, ...]:
    """The folders of the standard library and of installed packages, each with a separator at its end."""
    paths = sysconfig.get_paths()
    folders = {paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.update(site.getsitepackages())
    folders.add(site.getusersitepackages())
    folders.update(path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages"))
    return tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)


def folder_of(module: ModuleType) -> str | None:
    """Return the folder that has to be on ``sys.path`` for the user's module to be importable by its name."""
    filename = getattr(module, "__file__", None)
    if not isinstance(filename, str) or not is_users(module.__name__):
        return None
    folder = os.path.dirname(os.path.abspath(filename))
    depth = module.__name__.count(".") + (os.path.basename(filename).partition(".")[0] == "__init__")
    for _ in range(depth):
        folder = os.path.dirname(folder)
    return folder


def import_from(name: str, folder: str | None) -> ModuleType:
    """Import a module by name; only if that fails, with the folder appended to ``sys.path``."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        if folder is None or folder in sys.path:
            raise
        sys.path.append(folder)
        importlib.invalidate_caches()
        return importlib.import_module(name)
