"""Where the text of a running code object is to be had.

Python keeps no source with its code, so the text is looked for in the places where it may have been left:
``linecache`` (files, notebook cells, doctests, newer REPLs), the command line (``python -c``) and the REPL's history.
The last two only suggest texts; a suggestion counts when it compiles to the very code that is running.
"""

from __future__ import annotations
import __future__

import ast
import linecache
import sys
from collections.abc import Iterator
from inspect import CO_COROUTINE
from types import CodeType, FrameType

FUTURE_FLAGS = 0
"""All flags that ``from __future__ import ...`` leaves on a code object, or-ed together."""

for _name in __future__.all_feature_names:
    FUTURE_FLAGS |= getattr(__future__, _name).compiler_flag

_HISTORY_INPUTS = 300  # how many lines back an input of the REPL may begin
_HISTORY_EXTRA = 30  # how many lines an input may go on after the last line that has code


def texts(frame: FrameType) -> Iterator[str]:
    """Yield each text that may be the source of what ``frame`` runs, the likeliest first.

    A file's text is not proven to be the one that was imported; the caller compares it with the code.
    """
    code = frame.f_code
    filename = code.co_filename
    cached = "".join(linecache.getlines(filename, frame.f_globals))
    if filename == "<string>":
        # Whatever is exec'd has this name too, so nothing under it can be taken on trust.
        for argument in (cached, *sys.orig_argv):
            for text in (argument, argument.removeprefix("-c")):
                if "with" in text and _compiles_to(text, code, "exec"):
                    yield text
        return
    if cached:
        # What linecache holds may be older than the file, and then it is more likely what was imported.
        yield cached
        linecache.checkcache(filename)
        fresh = "".join(linecache.getlines(filename, frame.f_globals))
        if fresh != cached:
            yield fresh
    elif filename in ("<stdin>", "<console>"):
        yield from _typed(code)


def why_missing(filename: str) -> str:
    """Say in one sentence why there is no text under ``filename``, and what to do about it."""
    if filename == "<string>":
        return (
            "The code was made by exec() or eval() from a string, which Python does not keep. "
            "Write the code to a file and import it, or add its text to linecache.cache under a filename of its own."
        )
    if filename in ("<stdin>", "<console>"):
        return (
            "The code was read from standard input and is not in the history of the interactive interpreter. "
            "Write it to a file and run that, or use IPython or a notebook, which keep what is typed."
        )
    if filename.startswith("<"):
        return (
            f"The code was compiled under the made-up filename {filename!r} and nobody kept its text. "
            "Write it to a file, or add its text to linecache.cache under that filename."
        )
    return "There is no such file, or it cannot be read. Keep the source file beside the program that runs it."


def _compiles_to(text: str, code: CodeType, mode: str) -> bool:
    """Whether compiling ``text`` gives ``code``: equal bytecode, constants, names and positions."""
    flags = code.co_flags & FUTURE_FLAGS
    if code.co_flags & CO_COROUTINE:
        flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    try:
        whole = compile(text, code.co_filename, mode, flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError):
        return False
    return _holds(whole, code)


def _holds(whole: CodeType, code: CodeType) -> bool:
    return whole == code or any(_holds(part, code) for part in whole.co_consts if isinstance(part, CodeType))


def _typed(code: CodeType) -> Iterator[str]:
    """Yield the input of the interactive interpreter that ``code`` comes from, if readline remembers it."""
    readline = sys.modules.get("readline")
    if readline is None:
        return
    last = readline.get_current_history_length()
    history: list[str] = [readline.get_history_item(number) or "" for number in range(1, last + 1)]
    least = max((line for _, _, line in code.co_lines() if line), default=1)
    for start in range(last - 1, max(-1, last - _HISTORY_INPUTS), -1):
        if history[start][:1] in ("", " ", "\t", ")", "]", "}"):
            continue
        for end in range(start + least, min(last, start + least + _HISTORY_EXTRA) + 1):
            text = "\n".join(history[start:end]) + "\n"
            if "with" in text and (_compiles_to(text, code, "single") or _compiles_to(text, code, "exec")):
                yield text
                return
