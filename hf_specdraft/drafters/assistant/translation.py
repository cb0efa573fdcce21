"""An assistant with a tokenizer of its own: drafts travel as text (universal assisted decoding)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...draft import Commit, Context, Draft
from ..base import Session, TargetView

if TYPE_CHECKING:
    from .modeling_assistant import AssistantDrafter, AssistantSession


class Translated:
    """The drafter of one call, between the target's tokenizer and the assistant's."""

    feature_layers = ()

    def __init__(self, drafter: AssistantDrafter, tokenizer: Any, assistant_tokenizer: Any):
        self.drafter, self.tokenizer, self.assistant_tokenizer = drafter, tokenizer, assistant_tokenizer
        self.config, self.device = drafter.config, drafter.device

    def check(self, view: TargetView) -> None:
        """Vocabularies may differ here; whether the assistant's cache can be cut is asked when it starts."""

    def start(self, view: TargetView, batch: int) -> TranslatedSession:
        return TranslatedSession(self, view, batch)


class TranslatedSession(Session):
    """Keeps each row's text in both token languages. Drafts are point drafts: text has no law over target tokens."""

    def __init__(self, drafter: Translated, view: TargetView, batch: int):
        self.drafter = drafter
        self.ids: list[list[int]] = [[] for _ in range(batch)]
        self.inner: AssistantSession = drafter.drafter.start(view, batch)
        self.inner.vocab_size = self.inner.own_vocab

    def observe(self, commit: Commit) -> None:
        for ids, new in zip(self.ids, commit.tokens):
            ids += new

    def keep(self, rows: list[int]) -> None:
        self.ids = [self.ids[r] for r in rows]
        self.inner.keep(rows)

    def propose(self, context: Context) -> Draft:
        texts = [self.drafter.tokenizer.decode(ids, skip_special_tokens=True) for ids in self.ids]
        # Encoded whole, so that the assistant's start token stands once, in front.
        self.inner.replace([self.drafter.assistant_tokenizer(text)["input_ids"] for text in texts])
        greedy = Context(context.anchor, context.position, context.lengths, context.nodes)
        greedy.confidence_threshold = context.confidence_threshold
        draft = self.inner.propose(greedy)
        chains = []
        for b, (ids, tokens, valid) in enumerate(zip(self.ids, draft.tokens.tolist(), draft.valid.tolist())):
            said = [token for token, real in zip(tokens, valid) if real]
            chains.append(self._translate(ids, texts[b], self.inner.texts[b], said)[: context.lengths[b]])
        width = max(map(len, chains))
        padded = torch.tensor([c + [0] * (width - len(c)) for c in chains], dtype=torch.long).view(len(chains), width)
        return Draft.chain(padded.to(context.anchor.device), list(map(len, chains)))

    def _translate(self, ids: list[int], text: str, own: list[int], said: list[int]) -> list[int]:
        """The target tokens that continue `ids` when the assistant says `said` after its tokens `own`."""
        if not said:
            return []
        mine = self.drafter.assistant_tokenizer
        before = mine.decode(own, skip_special_tokens=True)
        new = mine.decode(own + said, skip_special_tokens=True)[len(before) :]
        # Tokens often depend on what stands before them: encode a little context too, and take what follows it.
        tail = ids[-16:]
        spelt = self.drafter.tokenizer.decode(tail, skip_special_tokens=True)
        encode = self.drafter.tokenizer
        joined = encode(spelt + new, add_special_tokens=False)["input_ids"]
        known = encode(spelt, add_special_tokens=False)["input_ids"]
        if joined[: len(known)] == known:
            return joined[len(known) :]
        return encode(new, add_special_tokens=False)["input_ids"]
