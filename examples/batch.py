"""Can I batch? Yes: pad on the left, as for plain generate. Each row accepts as many drafted tokens as it can.

python examples/batch.py [TARGET]
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_specdraft

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
target = AutoModelForCausalLM.from_pretrained(name)
drafter = hf_specdraft.NgramDrafter(hf_specdraft.NgramConfig())

questions = ["Count from one to ten, then again.", "Name a river.", "Say hello in three languages."]
chats = [[{"role": "user", "content": question}] for question in questions]
inputs = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
)
out = target.generate(
    **inputs, assistant_model=drafter, max_new_tokens=48, do_sample=False, return_dict_in_generate=True
)

answers = tokenizer.batch_decode(out.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
for question, answer, tokens, rounds in zip(questions, answers, out.speculation.tokens, out.speculation.rounds):
    print(f"{question}\n  {answer!r}\n  {tokens} tokens in {rounds} rounds after prefill")
