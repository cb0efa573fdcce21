"""Can I do without the patched generate, and stream? Give the loop itself as custom_generate, with the streamer.

python examples/stream.py [TARGET]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import hf_specdraft

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name)
target = AutoModelForCausalLM.from_pretrained(name)
drafter = hf_specdraft.NgramDrafter(hf_specdraft.NgramConfig())

messages = [{"role": "user", "content": "Write a short poem about rain, then write it once more."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
target.generate(
    **inputs,
    custom_generate=hf_specdraft.speculate(drafter, streamer=streamer),
    max_new_tokens=64,
    do_sample=False,
)
