"""Training texts written by the pair that will be deployed: the target, sped up by the drafter as it is at that moment
(AdaFlash 2607.19223, on-policy distillation).

Drafting does not change what the target writes, so what is on policy is the stream of prompts and answers of the day,
at the cost of decoding with the drafter's latest weights, whatever prompts the drafter is to serve.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from ..integration import as_drafter


class OnPolicyTexts(Dataset):
    """Rows of training as data folders have them, each a prompt and the target's answer, written when they are needed.

    Asked for any row, it gives the next one of a shuffled buffer; when that is empty, `samples` further prompts are
    answered, and each answer is given `uses` times. So it wants no worker processes, and a resumed run goes through
    the answers before once more. Not for sharded drafters (FSDP, DeepSpeed), whose weights are whole nowhere.

    texts: rows of a data folder; their prompts are what stands before each chat's first supervised token.
    model: the drafter in training, or PEFT's wrapper of it. temperature: 0 answers greedily.
    Raises ValueError when no text begins with a prompt, and for numbers below 1.
    """

    def __init__(
        self,
        texts: Iterable[Mapping[str, Any]],
        target: nn.Module,
        model: nn.Module,
        *,
        samples: int = 128,
        uses: int = 2,
        max_new_tokens: int = 256,
        batch_size: int = 8,
        temperature: float = 0.0,
        seed: int = 0,
    ):
        counts = {"samples": samples, "uses": uses, "max_new_tokens": max_new_tokens - 1, "batch_size": batch_size}
        low = [name for name, count in counts.items() if count < 1]
        if low or temperature < 0:
            raise ValueError(
                f"on_policy.{(low or ['temperature'])[0]} is too small; an answer has two tokens or more, everything "
                "else is at least 1, and a temperature at least 0"
            )
        self.prompts = prompts_of(texts)
        if not self.prompts:
            raise ValueError("no text of the data begins with a prompt, so there is nothing to answer on policy")
        self.target, self.model = target, model
        self.samples, self.uses, self.batch_size = samples, uses, batch_size
        law = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        self.request = {"max_new_tokens": max_new_tokens, "do_sample": False, **law, "return_dict_in_generate": True}
        # Processes answer prompts of their own.
        self.generator = torch.Generator().manual_seed(seed + int(os.environ.get("RANK", 0)))
        self._order: list[int] = []
        self._rows: list[dict[str, list[int]]] = []

    def __len__(self) -> int:
        return len(self.prompts) * self.uses

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if not self._rows:
            fresh = self._answered(self._next())
            order = torch.randperm(len(fresh) * self.uses, generator=self.generator).tolist()
            self._rows = [fresh[i % len(fresh)] for i in order]
        return self._rows.pop()

    def _next(self) -> list[list[int]]:
        if not self._order:
            self._order = torch.randperm(len(self.prompts), generator=self.generator).tolist()
        taken, self._order = self._order[: self.samples], self._order[self.samples :]
        return [self.prompts[i] for i in taken]

    def _answered(self, prompts: list[list[int]]) -> list[dict[str, list[int]]]:
        drafter, training = as_drafter(self.model), self.model.training
        autocast = drafter.__dict__.pop("forward", None)  # accelerate's, which no deployed drafter has
        self.model.eval()
        devices = [] if self.target.device.type == "cpu" else [self.target.device]
        try:
            with torch.random.fork_rng(devices, device_type=self.target.device.type):
                torch.manual_seed(int(torch.randint(2**62, (), generator=self.generator)))
                # Prompts of like length, so that little is padded.
                prompts = sorted(prompts, key=len)
                batches = [prompts[i : i + self.batch_size] for i in range(0, len(prompts), self.batch_size)]
                return [row for batch in batches for row in self._answer(batch)]
        finally:
            self.model.train(training)
            if autocast is not None:
                drafter.forward = autocast

    def _answer(self, prompts: list[list[int]]) -> list[dict[str, list[int]]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.target.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.target.device)
        out = self.target.generate(input_ids=ids, attention_mask=mask, assistant_model=self.model, **self.request)
        rows = []
        for prompt, new, count in zip(prompts, out.sequences[:, width:].tolist(), out.speculation.tokens):
            text = prompt + new[:count]
            supervised = [False] * len(prompt) + [True] * count
            rows.append({"input_ids": text, "loss_mask": supervised, "document_ids": [1] * len(text)})
        return rows


def prompts_of(texts: Iterable[Mapping[str, Sequence]]) -> list[list[int]]:
    """What stands before the first supervised token of each chat in the rows of a data folder; chats without any such
    token, or without anything before it, are left out."""
    found = []
    for row in texts:
        ids, documents, mask = (list(row[name]) for name in ("input_ids", "document_ids", "loss_mask"))
        start = 0
        for end in range(1, len(ids) + 1):
            if end < len(ids) and documents[end] == documents[start]:
                continue
            written = next((i for i in range(start, end) if mask[i]), start)
            if written > start:
                found.append(ids[start:written])
            start = end
    return found
