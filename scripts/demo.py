"""Eight prompts on SmolLM2-135M-Instruct: plain, by n-grams, by the trained drafter, by both. The same text, sooner.

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

from hf_specdraft import AutoDrafter, CombinedDrafter, NgramConfig, NgramDrafter, evaluation
from hf_specdraft.packing import has_bfloat16, pack_linears

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "examples" / "prompts.jsonl"
DRAFTER = ROOT / "model_cards" / "SmolLM2-135M-Instruct-eagle3"
STREAMED = "code-edit"
MAX_NEW_TOKENS = 96


def main() -> int:
    logging.disable_progress_bar()
    # A pipe has no width of its own, and 80 columns would break the rows.
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print("Getting the model (converted once, then kept) ...")
    target, tokenizer = evaluation.load_target(str(get_model()), "float32")
    ngram = NgramDrafter(NgramConfig())
    network = AutoDrafter.from_pretrained(DRAFTER, dtype="bfloat16" if has_bfloat16() else "float32")
    drafters = {"ngram": ngram, "network": network, "both": CombinedDrafter.from_drafters(ngram, network)}
    # Plain decoding gets the packed weights as well.
    packed = sum(pack_linears(model) for model in (target, network))
    prompts = evaluation.read_prompts(PROMPTS)
    inputs = {p.id: evaluation.encode(tokenizer, p.text) for p in prompts}

    console.rule(f"streaming '{STREAMED}', assisted by both")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    evaluation.run(target, inputs[STREAMED], MAX_NEW_TOKENS, streamer=streamer, assistant_model=drafters["both"])
    console.rule()

    table = Table("category", "tokens", "plain tok/s", *(f"{name}: tau, x plain" for name in drafters), "identical")
    differing, made, spent = 0, 0, dict.fromkeys(["plain", *drafters], 0.0)
    counts = {name: [0, 0] for name in drafters}
    for p in track(prompts, "plain and assisted", console=console, transient=True):
        plain = evaluation.run(target, inputs[p.id], MAX_NEW_TOKENS)
        spent["plain"] += plain.seconds
        made += len(plain.ids)
        cells, identical = [], True
        for name, drafter in drafters.items():
            fast = evaluation.run(target, inputs[p.id], MAX_NEW_TOKENS, assistant_model=drafter)
            identical &= plain.ids == fast.ids
            spent[name] += fast.seconds
            counts[name] = [counts[name][0] + fast.committed, counts[name][1] + fast.passes]
            cells.append(f"{fast.speculation.tau:.2f}  {plain.seconds / fast.seconds:.2f}")
        differing += not identical
        speed = f"{len(plain.ids) / plain.seconds:.1f}"
        table.add_row(p.category, str(len(plain.ids)), speed, *cells, "yes" if identical else "NO")
    table.add_section()
    cells = [f"{counts[name][0] / counts[name][1]:.2f}  {spent['plain'] / spent[name]:.2f}" for name in drafters]
    speed = f"{made / spent['plain']:.1f}"
    table.add_row("all", str(made), speed, *cells, "yes" if not differing else f"{differing} NO")
    console.print(table)
    console.print(f"float32, {packed} layers packed, greedy, {torch.get_num_threads()} CPU threads")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
