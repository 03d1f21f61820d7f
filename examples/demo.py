"""Streams a trace in the terminal: each token as it comes and, beside it, what a middle layer already predicts.

The layer's prediction is a logit lens: its residual stream, put through the model's last norm and its head, inside
the block (https://www.lesswrong.com/posts/AcKRB8wDpdaN6v6ru/interpreting-gpt-the-logit-lens).
"""

import asyncio
import os
import sys
import warnings
from pathlib import Path

# Quiet, and steady on a machine whose cores others use as well; all of it can be set from outside.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

from endoscope import VLLM

PROMPT = "The Eiffel Tower is in the city of"
MODEL = Path(__file__).parent.parent / ".models" / "smollm2"


async def main(max_tokens: int = 12) -> None:
    """Stream the trace."""
    console = Console()
    with console.status("starting vLLM …"):
        model = VLLM(
            str(MODEL),
            mode="async",
            dtype="float32",
            max_model_len=512,
            kv_cache_memory_bytes=1 << 28,
            use_tqdm_on_load=False,
        ).start()
    layers = await model.modules()
    middle = sum(path.count(".") == 2 and path.startswith("model.layers.") for path in layers) * 2 // 3
    async with model:
        with model.trace(PROMPT, max_tokens=max_tokens, temperature=0.0) as tracer:
            for step in tracer.iter[:]:
                stream = model.model.layers[middle].resid_post[-1:]
                lens = model.logits_processor(model.lm_head, model.model.norm(stream)).softmax(-1)
                final = model.logits.softmax(-1)
                tracer.emit(lens=lens.topk(3), sure=final.max().item())

        decode = model.tokenizer.decode
        console.print(f"\n[bold]{PROMPT}[/bold]\n")
        console.print(f"{'token':<16}{'sure':>5}    layer {middle} already predicts", style="dim")
        shown = ""
        async for output in tracer.backend:
            text = output.outputs[0].text
            if not output.emits:
                continue
            values, ids = output.emits["lens"]
            guesses = "  ".join(
                f"{decode([token])!r} {chance:.0%}"
                for token, chance in zip(ids[0].tolist(), values[0].tolist(), strict=True)
            )
            console.print(f"{text[len(shown) :]!r:<16}{output.emits['sure']:>5.0%}    {guesses}", highlight=False)
            shown = text
        console.print(f"\n[bold]{PROMPT}[/bold][green]{shown}[/green]")


if __name__ == "__main__":
    if not MODEL.is_dir():
        sys.exit(f"{MODEL} is missing: run `make models`, or `make demo`, which does it first")
    warnings.simplefilter("ignore", FutureWarning)
    asyncio.run(main())
