"""What the tests around the loop share: batches of prompts, plain's answers to them, drafters scripted from those."""

from __future__ import annotations

import functools

import targets
from conftest import ScriptedDrafter, adversary, mixed, oracle
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

FREE = 48  # new tokens of plain's answers


def scripts(k: int) -> dict:
    return {"oracle": oracle(k), "adversary": adversary, "mixed": mixed(k)}


def prompts(batch: int) -> dict[str, Tensor]:
    """`batch` left-padded prompts of 8, 5, 11, 8, 5, ... tokens."""
    return targets.padded(targets.prompts(tuple((8, 5, 11)[b % 3] for b in range(batch))))


@functools.cache
def free_answers(target: PreTrainedModel, batch: int, penalty: float = 1.0) -> list[list[int]]:
    """Plain's unpadded rows for `prompts(batch)`: the prompt, then FREE tokens without any stop."""
    inputs = prompts(batch)
    free = target.generate(**inputs, max_new_tokens=FREE, do_sample=False, repetition_penalty=penalty)
    return [row[mask.argmax() :].tolist() for row, mask in zip(free, inputs["attention_mask"])]


def scripted(target, batch, rows, length=4, tree=False, penalty=1.0) -> ScriptedDrafter:
    """A drafter for `prompts(batch)`; row b follows the script rows[b % len(rows)]."""
    return ScriptedDrafter(free_answers(target, batch, penalty), rows, length, tree)


def new_tokens(sequences: Tensor, inputs: dict[str, Tensor]) -> list[list[int]]:
    return sequences[:, inputs["input_ids"].shape[1] :].tolist()


class Recording(BaseStreamer):
    """Keeps what it is given: the prompt first, then one step after the other."""

    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.puts.append(value.tolist())

    def end(self):
        self.ends += 1


def byte_tokenizer(characters: str = "".join(sorted(pre_tokenizers.ByteLevel.alphabet()))) -> PreTrainedTokenizerFast:
    """One token per byte, or for these characters only."""
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(characters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=characters[0])
