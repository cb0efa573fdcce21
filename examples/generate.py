"""How do I use it? One argument more to generate.

python examples/generate.py [TARGET]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdraft

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
target = AutoModelForCausalLM.from_pretrained(name)
drafter = hf_specdraft.NgramDrafter(hf_specdraft.NgramConfig())

messages = [{"role": "user", "content": "Repeat word for word: the quick brown fox jumps over the lazy dog."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = target.generate(
    **inputs, assistant_model=drafter, max_new_tokens=48, do_sample=False, return_dict_in_generate=True
)

print(tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"{out.speculation.tau:.2f} tokens per target pass, {out.speculation.acceptance:.0%} of the drafts accepted")
