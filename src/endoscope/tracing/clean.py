"""Tracebacks that show the user's code and not the machinery's."""

from __future__ import annotations

from endoscope.errors import EngineError, TraceError
from endoscope.tracing.skip import Skipped


def clean(error: BaseException) -> None:
    """Make an error ready to be raised again, with a bare ``raise``, out of an ``__enter__`` or ``__exit__``.

    The traceback of an error of ours is replaced by the one that it carries in ``__endoscope_traceback__`` (a block's
    own lines), or removed; a bare ``raise`` adds no entry, so the user's line with the ``with`` comes first.
    An error that ours does not raise keeps its traceback.
    """
    if hasattr(error, "__endoscope_traceback__") or isinstance(error, TraceError | EngineError):
        error.__traceback__ = getattr(error, "__endoscope_traceback__", None)
    # __exit__ runs while the skipped body's exception is handled, and Python notes that on whatever is raised then.
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link.__context__, Skipped):
            link.__context__ = None
        link = link.__context__
