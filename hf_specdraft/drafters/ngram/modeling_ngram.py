"""The drafter without weights, and the session that remembers its rows' texts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import torch

from ...draft import Commit, Context, Draft
from .. import register
from ..base import Drafter, Session, TargetView
from . import matcher
from .configuration_ngram import NgramConfig
from .matcher import SEPARATOR, Text


class SharedPool:
    """Responses that other rows and calls may copy from, first in, first out.

    Opt-in memory: users who share a pool can notice each other's answers by their speed, and a sampled output may
    depend on what is in it. Safe to share between threads.
    """

    def __init__(self, max_responses: int = 256):
        if max_responses < 1:
            raise ValueError(
                f"max_responses must be at least 1, got {max_responses}; share no pool to remember nothing"
            )
        self.max_responses = max_responses
        self._responses: dict[int, Text] = {}
        self._keys = count()
        self._ids: np.ndarray | None = None
        self._lock = threading.Lock()

    def start(self) -> int:
        """The key of a new, empty response; the oldest ones leave to make room for it."""
        with self._lock:
            key = next(self._keys)
            self._responses[key] = Text()
            while len(self._responses) > self.max_responses:
                self._responses.pop(next(iter(self._responses)))
            self._ids = None
            return key

    def extend(self, key: int, tokens: Sequence[int]) -> None:
        """More tokens of a response; nothing happens when it has left already."""
        with self._lock:
            if key in self._responses:
                self._responses[key].extend(tokens)
                self._ids = None

    def remove(self, key: int) -> None:
        with self._lock:
            self._responses.pop(key, None)
            self._ids = None

    @property
    def ids(self) -> np.ndarray:
        """All responses in one array, a separator before each."""
        with self._lock:
            if self._ids is None:
                self._ids = np.concatenate([Text().ids, *(text.ids for text in self._responses.values())])
            return self._ids


@register
class NgramDrafter(Drafter):
    """Prompt lookup with suffix matching, frequency-scored trees and an optional corpus.

    The corpus is a buffer, so that it is saved, loaded and uploaded like weights. Each draft reads it once from end to
    end, which takes two to six milliseconds for a million tokens.
    """

    config_class = NgramConfig
    is_free = True

    def __init__(self, config: NgramConfig):
        super().__init__(config)
        self.register_buffer("corpus", torch.full((config.corpus_size,), SEPARATOR, dtype=torch.int32))
        self.pool: SharedPool | None = None
        self.post_init()

    def set_corpus(self, texts: Iterable[Sequence[int] | np.ndarray | str | Path]) -> None:
        """Replace the corpus. texts: token ids, each one a sequence or a file: .npy, or .safetensors whose tensors are
        taken in the order of their names; arrays of more dimensions hold one text per row.

        Raises ValueError when a text is not made of token ids of the target's vocabulary (when the config knows it).
        """
        parts = [text for source in texts for text in _texts(source)]
        for text in parts:
            vocab = self.config.vocab_size or np.iinfo(np.int32).max
            if text.dtype.kind not in "iu" or (text.size and not 0 <= text.min() <= text.max() < vocab):
                raise ValueError(f"a corpus text must hold token ids from 0 to {vocab - 1}, got {text.dtype} {text}")
        joined = np.concatenate([Text(text).ids for text in parts]) if parts else np.empty(0, dtype=np.int32)
        self.corpus = torch.from_numpy(joined).to(self.corpus.device)
        self.config.corpus_size = len(joined)

    def check(self, view: TargetView) -> None:
        super().check(view)
        if self.corpus.numel() and int(self.corpus.max()) >= view.vocab_size:
            raise ValueError(
                f"the corpus holds token {int(self.corpus.max())} but the target's vocabulary has {view.vocab_size}; "
                "make the corpus with the target's own tokenizer (set_corpus)"
            )

    def start(self, view: TargetView, batch: int) -> NgramSession:
        return NgramSession(self, batch)


def _texts(source: Sequence[int] | np.ndarray | str | Path) -> list[np.ndarray]:
    if not isinstance(source, str | Path):
        arrays = [np.asarray(source)]
    elif Path(source).suffix == ".safetensors":
        from safetensors.numpy import load_file

        arrays = [array for _, array in sorted(load_file(source).items())]
    elif Path(source).suffix == ".npy":
        arrays = [np.load(source)]
    else:
        raise ValueError(f"corpus files are .npy or .safetensors, got {source}")
    return [row for array in arrays for row in array.reshape(-1, array.shape[-1] if array.ndim else 1)]


class NgramSession(Session):
    """The rows' texts. Rows do not see each other, unless the drafter was given a pool."""

    def __init__(self, drafter: NgramDrafter, batch: int):
        self.drafter = drafter
        self.config = drafter.config
        self.texts = [Text() for _ in range(batch)]
        self.corpus = drafter.corpus.cpu().numpy()
        self.pool = drafter.pool
        # The pool's key of each row's response, from its first token on.
        self.keys: list[int | None] = [None] * batch

    def observe(self, commit: Commit) -> None:
        for row, tokens in enumerate(commit.tokens):
            self.texts[row].extend(tokens)
            if self.pool is not None and tokens:
                if self.keys[row] is None:
                    self.keys[row] = self.pool.start()
                    # What comes first is the prompt, and prompts stay out of the pool.
                    tokens = tokens[-1:]
                self.pool.extend(self.keys[row], tokens)

    def propose(self, context: Context) -> Draft:
        config = self.config
        tree = context.tree and config.tree_nodes > 0
        common = (tree, config.min_prob, config.max_depth, config.max_occurrences)
        if config.scoring == "blend":
            search, own = matcher.blend, (config.escape, config.recent)
        else:
            search, own = matcher.suffix, (config.max_spec_factor, config.max_spec_offset)
        shared = [self.corpus] if len(self.corpus) else []
        if self.pool is not None:
            shared.append(self.pool.ids)
        grown = []
        for text, depth in zip(self.texts, context.lengths):
            nodes = context.nodes if tree else min(depth, context.nodes)
            found = search([text.ids, *shared], text.ids[1:], nodes, depth, *common, *own) if depth else matcher.NOTHING
            grown.append(found)
        lengths = [len(growth.tokens) for growth in grown]
        width = max(lengths, default=0)
        device = context.anchor.device

        def padded(name: str, fill: float) -> list[list]:
            rows = [getattr(growth, name) for growth in grown]
            return [row + [fill] * (width - len(row)) for row in rows]

        tokens = torch.tensor(padded("tokens", 0), dtype=torch.long, device=device)
        confidence = torch.tensor(padded("probs", 0.0), dtype=torch.float32, device=device)
        draft = Draft.chain(tokens, lengths, confidence=confidence)
        if tree:
            draft.parents = torch.tensor(padded("parents", -1), dtype=torch.long)
            draft.is_chain = False
        return draft

    def keep(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.keys = [self.keys[row] for row in rows]
