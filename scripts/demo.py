"""Eight prompts on SmolLM2-135M-Instruct, plain and with the n-gram drafter: the same text, sooner.

    python scripts/demo.py

Exit status 1 when any text differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from get_model import get_model
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import TextStreamer
from transformers.utils import logging

from hf_specdraft import NgramConfig, NgramDrafter, evaluation

PROMPTS = Path(__file__).resolve().parent.parent / "examples" / "prompts.jsonl"
STREAMED = "code-edit"
MAX_NEW_TOKENS = 96


def main() -> int:
    logging.disable_progress_bar()
    console = Console()
    console.print("Getting the model (converted once, then kept) ...")
    target, tokenizer = evaluation.load_target(str(get_model()), "float32")
    assisted = {"assistant_model": NgramDrafter(NgramConfig())}
    prompts = evaluation.read_prompts(PROMPTS)
    inputs = {p.id: evaluation.encode(tokenizer, p.text) for p in prompts}

    console.rule(f"streaming '{STREAMED}', assisted")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    evaluation.run(target, inputs[STREAMED], MAX_NEW_TOKENS, streamer=streamer, **assisted)
    console.rule()

    table = Table("category", "tokens", "plain tok/s", "assisted tok/s", "ratio", "tau", "identical")
    differing, spent, made = 0, [0.0, 0.0], 0
    for p in track(prompts, "plain and assisted", console=console, transient=True):
        plain = evaluation.run(target, inputs[p.id], MAX_NEW_TOKENS)
        fast = evaluation.run(target, inputs[p.id], MAX_NEW_TOKENS, **assisted)
        identical = plain.ids == fast.ids
        differing += not identical
        made += len(plain.ids)
        spent = [spent[0] + plain.seconds, spent[1] + fast.seconds]
        table.add_row(
            p.category,
            str(len(plain.ids)),
            f"{len(plain.ids) / plain.seconds:.1f}",
            f"{len(fast.ids) / fast.seconds:.1f}",
            f"{plain.seconds / fast.seconds:.2f}",
            f"{fast.speculation.tau:.2f}",
            "yes" if identical else "NO",
        )
    table.add_section()
    speeds = [f"{made / seconds:.1f}" for seconds in spent]
    verdict = "yes" if not differing else f"{differing} NO"
    table.add_row("all", str(made), *speeds, f"{spent[0] / spent[1]:.2f}", "", verdict)
    console.print(table)
    console.print(f"float32, greedy, {torch.get_num_threads()} CPU threads")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
