"""hf-specdraft generate: stream an answer and say what drafting gained."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import torch
import typer
from transformers import TextStreamer

from .. import evaluation
from .options import (
    SPEC,
    Device,
    Dtype,
    DtypeOption,
    MaxNewTokens,
    PackCpu,
    Target,
    TemplateKwargs,
    warn_of_template,
)


def generate(
    target: Target,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; read from standard input when left out.")] = None,
    drafter: Annotated[str, typer.Option(help=SPEC)] = "ngram",
    max_new_tokens: MaxNewTokens = 256,
    sample: Annotated[bool, typer.Option(help="Sample instead of decoding greedily.")] = False,
    temperature: Annotated[float, typer.Option(help="For --sample.")] = 1.0,
    seed: Annotated[int, typer.Option(help="For --sample.")] = 0,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the chat template, where there is one.")] = True,
    chat_template_kwargs: TemplateKwargs = "{}",
    dtype: DtypeOption = Dtype.auto,
    device: Device = "cpu",
    pack_cpu: PackCpu = False,
) -> None:
    """Stream the target's answer to a prompt, sped up by a drafter; a line of statistics goes to standard error."""
    prompt = sys.stdin.read() if prompt is None else prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty: give it as an argument or on standard input")
    model, tokenizer = evaluation.load_target(target, dtype.value, device, pack_cpu)
    inputs = evaluation.encode(tokenizer, prompt, model.device, chat=chat, template_kwargs=chat_template_kwargs)
    loaded = evaluation.load_drafter(drafter, dtype.value, device, pack_cpu)
    warn_of_template([loaded], tokenizer, chat_template_kwargs if chat else None)
    torch.manual_seed(seed)
    start = time.perf_counter()
    output = model.generate(
        **inputs,
        assistant_model=loaded,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        max_new_tokens=max_new_tokens,
        do_sample=sample,
        return_dict_in_generate=True,
        **({"temperature": temperature} if sample else {}),
    )
    seconds, gained = time.perf_counter() - start, output.speculation
    tokens = sum(gained.tokens)
    print(
        f"{tokens} tokens in {seconds:.1f} s ({tokens / seconds:.1f} tokens/s), tau {gained.tau:.2f}, "
        f"acceptance {gained.acceptance:.0%} of {gained.verified} drafted tokens",
        file=sys.stderr,
    )
