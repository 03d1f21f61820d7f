"""From an invoke to a request that vLLM takes, and from its finished output to what the block saved."""

from __future__ import annotations

import difflib
import itertools
import linecache
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from endoscope.errors import PromptError, SamplingError
from endoscope.tracing.block import Block
from endoscope.tracing.failure import put_together
from endoscope.tracing.messages import Emitted, Submission, encode
from endoscope.tracing.serialize import loads
from endoscope.vllm import internals
from endoscope.vllm.inbox import Arrival, Inbox

_numbers = itertools.count()

PATIENCE = 2.0
"""Seconds that the values of a finished request may take to come home before the engine is asked about them."""

_OPTIONS = ("lora_request", "priority")
"""Arguments of a trace that belong to the request and not to its sampling."""


class Request:
    """One invoke on its way through the engine.

    Attributes:
        index: the number of its invoke.
        sequences: how many sequences it samples, vLLM's ``n``.
        ids: vLLM's own ids of them.
        output: the finished output, once there is one.
        saves: what its block saved, once that has come home.
        error: what its block raised.
    """

    def __init__(
        self,
        llm: Any,
        inbox: Inbox | None,
        index: int,
        prompt: Any,
        sampling: Mapping[str, Any],
        block: Block | None,
        final_only: bool = False,
    ) -> None:
        self.inbox = inbox
        self.index = index
        self.block = block
        self.output: Any = None
        self.saves: dict[str, Any] = {}
        self.error: BaseException | None = None
        self.arrival: Arrival | None = None
        prompt = check_prompt(prompt)
        options = {name: value for name, value in sampling.items() if name in _OPTIONS and value is not None}
        params = make_params({name: value for name, value in sampling.items() if name not in _OPTIONS})
        if block is not None and inbox is not None:
            self.arrival = inbox.expect(params.n)
            home, key = inbox.address, self.arrival.key
            submission = Submission(
                block.reads_only, home, key, block.code, block.values, block.skips_throughout, block.reach
            )
            internals.put_submission(params, encode(submission))
        if final_only:
            internals.final_only(params)
        try:
            self.made, self.text = self._process(llm, prompt, params, options)
        except BaseException:
            self.forget()
            raise
        self.parent, self.children = internals.fan_out(self.made)
        self.sequences = len(self.children)
        self.ids = [child.request_id for child in self.children]
        self._joins = self.sequences > 1 and internals.accumulates(params)
        self._completions: dict[int, Any] = {}
        self._delta = not internals.accumulates(params)
        self._made: dict[int, int] = {}
        """Tokens that each sequence has, as far as outputs have told."""
        self._asked = False

    def _process(self, llm: Any, prompt: Any, params: Any, options: dict[str, Any]) -> tuple[Any, str | None]:
        name = f"trace-{self.arrival.key}" if self.arrival is not None else f"generate-{next(_numbers)}"
        # Keys and values that a block may have changed are found by nobody else.
        salt = secrets.token_hex(16) if self.block is not None and not self.block.reads_only else None
        try:
            made, text = internals.process(llm, name, prompt, params, salt, **options)
        except internals.refusals() as error:
            kind = SamplingError if _is_about_sampling(error) else PromptError
            raise kind(f"vLLM refuses the request: {error}") from error
        if self.block is not None:
            longest, budget = internals.limits(llm)
            tokens = internals.prompt_length(made)
            if tokens > budget:
                raise PromptError(
                    f"the prompt has {tokens} tokens, and a step of this engine takes {budget}: a traced prompt is "
                    f"run in one step, so this one can never be. Build the engine with "
                    f"max_num_batched_tokens={tokens} or more"
                )
            if tokens >= longest:
                raise PromptError(
                    f"the prompt has {tokens} tokens, and the model takes {longest} with what it generates"
                )
        return made, text

    def register(self, llm: Any, queue: Any = None) -> None:
        """Tell vLLM's output processor of the request."""
        internals.register(llm, self.made, self.text, self.parent, self.children, queue)

    @property
    def ready(self) -> bool:
        """Whether everything that its blocks send has come home."""
        return self.arrival is None or self.arrival.complete

    def missing(self) -> list[tuple[str, str, int, str]]:
        """What is to be told to ``endoscope_missing``: the sequences whose blocks have sent nothing, the first time.

        A request that ends in the queue, since it is aborted there or its grammar cannot be compiled, never has a block
        that could send anything.
        """
        if self.arrival is None or self.inbox is None or self._asked:
            return []
        self._asked = True
        home, key, ended = self.inbox.address, self.arrival.key, self.arrival.ended
        return [(name, key, number, home) for number, name in enumerate(self.ids) if number not in ended]

    def label(self, output: Any, resolve: Callable[[tuple[str, ...]], Any]) -> Any:
        """Give an output what the user finds on every one; returns it."""
        output.invoke = self.index
        output.saves = {}
        output.emits = {}
        output.gears = internals.gears_of(output)
        for completion in output.outputs:
            before = self._made.get(completion.index, 0) if self._delta else 0
            self._made[completion.index] = before + len(completion.token_ids)
        if self._joins:
            # vLLM reports each sequence by itself; the finished output has all of them, as on the synchronous path.
            self._completions.update((completion.index, completion) for completion in output.outputs)
            if output.finished:
                output.outputs = [self._completions[number] for number in sorted(self._completions)]
        if self.arrival is not None and self.arrival.emitted:
            output.emits = merge([loads(each.values, resolve) for each in self._emitted(output)])
        return output

    def _emitted(self, output: Any) -> list[Emitted]:
        """What was emitted up to the step of an output; later steps' values may have come as well."""
        assert self.arrival is not None
        mine: list[Emitted] = []
        later: list[Emitted] = []
        for each in self.arrival.emitted:
            (mine if output.finished or each.step < self._made.get(each.sequence, 0) else later).append(each)
        self.arrival.emitted = later
        return mine

    def collect(self, resolve: Callable[[tuple[str, ...]], Any]) -> None:
        """Read what has come home, now that the output is finished."""
        if self.arrival is None:
            return

        def find(key: tuple[str, ...]) -> Any:
            return self.output if key == ("result",) else resolve(key)

        sequences = []
        assert self.block is not None
        lines = _lines(self.block)
        for _, (ended, buffers) in sorted(self.arrival.ended.items()):
            sequences.append(loads(ended.saves, find, buffers))
            if ended.failure is not None and self.error is None:
                self.error = put_together(ended.failure, find, lines)
        self.saves = merge(sequences)
        self.output.saves = self.saves
        self.error = self.error or self.arrival.refused
        if self.error is not None:
            self.error.output = self.output  # type: ignore[attr-defined]
            self.error.request = self.output.request_id  # type: ignore[attr-defined]
        self.forget()

    def forget(self) -> None:
        """Drop whatever else comes home."""
        if self.arrival is not None and self.inbox is not None:
            self.inbox.forget(self.arrival)


def _lines(block: Block) -> dict[str, list[str]]:
    code = block.code
    if linecache.getline(code.filename, code.line):
        return {}
    text = [""] * (code.line - 1) + code.source.split("\n")
    return {code.filename: [line + "\n" for line in text]}


def _is_about_sampling(error: Exception) -> bool:
    parameter = getattr(error, "parameter", None)
    if parameter is not None:
        return str(parameter) in internals.sampling_names()
    return not re.search(r"prompt|token|length", str(error), re.IGNORECASE)


def merge(saves: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several dicts of saves as one: a name of one of them is its value, a name of several the list of theirs."""
    found: dict[str, list[Any]] = {}
    for each in saves:
        for name, value in each.items():
            found.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def make_params(sampling: Mapping[str, Any]) -> Any:
    """vLLM's ``SamplingParams`` from a trace's arguments.

    Raises:
        SamplingError: for an argument that vLLM does not know, or a value that it refuses.
    """
    try:
        return internals.sampling_params(sampling)
    except TypeError as error:
        names = internals.sampling_names()
        unknown = [name for name in sampling if name not in (*names, "sampling_params")]
        if not unknown:
            raise SamplingError(f"vLLM refuses the sampling arguments: {error}") from error
        near = [match for name in unknown for match in difflib.get_close_matches(name, names, n=3)]
        hint = f"; nearest are {', '.join(near)}" if near else ""
        raise SamplingError(f"vLLM knows no sampling argument {', '.join(map(repr, unknown))}{hint}") from error
    except internals.refusals() as error:
        raise SamplingError(f"vLLM refuses the sampling arguments: {error}") from error


def check_prompt(prompt: Any) -> Any:
    """A prompt in a form that vLLM takes: text, token ids, what a tokenizer returns, or vLLM's own dict.

    Raises:
        PromptError: for anything else, and for an empty prompt.
    """
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        prompt = prompt["input_ids"]
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, (list, tuple)):
        if len(prompt) == 1 and isinstance(prompt[0], (list, tuple)):
            prompt = prompt[0]
        if not prompt:
            raise PromptError("the prompt is empty: it has no token")
        if all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            if min(prompt) < 0:
                raise PromptError(f"the prompt has a negative token id, {min(prompt)}")
            return {"prompt_token_ids": list(prompt)}
        kinds = ", ".join(sorted({type(item).__name__ for item in prompt}))
        raise PromptError(
            f"a prompt is one text or one list of token ids, not a {type(prompt).__name__} of {kinds}. For several "
            f"prompts, write one `with tracer.invoke(prompt):` for each in a trace without a prompt"
        )
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError("the prompt is empty: it has no character, and so no token")
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        known = ("prompt", "prompt_token_ids", "prompt_embeds")
        if not any(name in prompt for name in known):
            raise PromptError(f"a prompt given as a dict has one of {', '.join(known)}; this one has {list(prompt)}")
        for name in known[:2]:
            if name in prompt and not prompt[name]:
                raise PromptError(f"the prompt is empty: {name!r} holds nothing")
        return dict(prompt)
    raise PromptError(f"a prompt is text, token ids, or vLLM's dict of them, not a {type(prompt).__name__}")


def every(requests: Iterable[Request]) -> list[str]:
    """vLLM's ids of all the sequences of some requests."""
    return [name for request in requests for name in request.ids]
