"""What does a LoRA on maths gain a drafter, and what does it cost elsewhere?

python examples/lora_maths.py ANSWERS PROMPTS [KEY=VALUE ...]

ANSWERS: answers.jsonl of `hf-specdraft data`, of which those to GSM8K's questions are learnt. PROMPTS: Spec-Bench, of
which the last ones of each category are decoded. KEY=VALUE: over lora_maths.yaml's, such as drafter.init_from=FOLDER.
"""

import sys
from itertools import groupby
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_specdraft import AutoDrafter, evaluation
from hf_specdraft.training.answers import read_rows
from hf_specdraft.training.config import TrainConfig
from hf_specdraft.training.data import prepare

DOMAIN, HELD, ELSEWHERE, NEW_TOKENS = "math_reasoning", 12, 4, 64

answers, prompts, *overrides = sys.argv[1:]
config = TrainConfig.read(Path(__file__).with_suffix(".yaml"), overrides)
name, source, adapter = config.target["name"], config.drafter["init_from"], config.trainer["output_dir"]
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")

# The target's own answers to maths questions, none of them among those that are decoded below.
maths = [row for row in read_rows(answers) if row["source"].startswith("gsm8k")]
prepare(maths, tokenizer, config.data, dedupe=prompts, held_out=0, about={"target": name})

trainer = config.build()
trainer.train()
trainer.finish()

target = AutoModelForCausalLM.from_pretrained(name, dtype=config.target.get("dtype", "auto")).eval()
held = {}
for category, group in groupby(evaluation.read_prompts(prompts), key=lambda prompt: prompt.category):
    held.setdefault(category, []).extend(group)


def taus(drafter):
    """Tokens per target pass in each category, drafting always."""
    drafter.config.policy = "fixed"
    drafter.to(target.device, target.dtype).eval()
    measured = {}
    for category, group in held.items():
        texts = [prompt.text for prompt in group[-(HELD if category == DOMAIN else ELSEWHERE) :]]
        inputs = tokenizer.apply_chat_template(
            [[{"role": "user", "content": text}] for text in texts],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(target.device)
        inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        run = evaluation.run(target, inputs, NEW_TOKENS, assistant_model=drafter)
        measured[category] = run.committed / run.passes
    return measured


before = taus(AutoDrafter.from_pretrained(source))
after = taus(PeftModel.from_pretrained(AutoDrafter.from_pretrained(source), adapter).merge_and_unload())
print(f"{'tau':<16}before  after")
for category in sorted(held, key=lambda category: category != DOMAIN):
    print(f"{category:<16}{before[category]:6.2f} {after[category]:6.2f}")
