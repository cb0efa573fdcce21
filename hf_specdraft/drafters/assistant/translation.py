"""An assistant with a tokenizer of its own: drafts travel as text (universal assisted decoding)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ...draft import Commit, Context, Draft
from ..base import Session, TargetView

if TYPE_CHECKING:
    from .modeling_assistant import AssistantDrafter, AssistantSession


class Translated:
    """An assistant between the target's tokenizer and its own. What is not said here is as the assistant has it.

    It refers to the assistant weakly: it is kept with it, and must not keep it alive.
    """

    def __init__(self, drafter: AssistantDrafter, tokenizer: Any, assistant_tokenizer: Any):
        self._drafter = weakref.ref(drafter)
        self.tokenizer, self.assistant_tokenizer = tokenizer, assistant_tokenizer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._drafter(), name)

    def check(self, view: TargetView) -> None:
        """Raise ValueError when the assistant cannot draft; vocabularies may differ here."""
        self.check_drafting()

    def start(self, view: TargetView, batch: int) -> TranslatedSession:
        return TranslatedSession(self, self._drafter().start(view, batch))


_latest: weakref.WeakKeyDictionary[AssistantDrafter, Translated] = weakref.WeakKeyDictionary()


def translated(drafter: AssistantDrafter, tokenizer: Any, assistant_tokenizer: Any) -> Translated:
    """The assistant between these tokenizers: the same object as in its last call if they are the same, so that costs
    measured for it are known and its session can go on."""
    found = _latest.get(drafter)
    if found is None or found.tokenizer is not tokenizer or found.assistant_tokenizer is not assistant_tokenizer:
        found = _latest[drafter] = Translated(drafter, tokenizer, assistant_tokenizer)
    return found


class TranslatedSession(Session):
    """Keeps each row's text in both token languages. Drafts are point drafts: text has no law over target tokens."""

    def __init__(self, drafter: Translated, inner: AssistantSession):
        self.drafter = drafter
        self.ids: list[list[int]] = [[] for _ in inner.texts]
        self.inner = inner
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
        greedy.more = context.more
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
