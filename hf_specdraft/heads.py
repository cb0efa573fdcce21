"""The vocabulary side of a drafter, whatever its family: from hidden states to laws over the target's tokens.

| head | config | tensors |
| --- | --- | --- |
| borrowed: the target's, called in place | `own_head=False` | none |
| own | `own_head=True` | `lm_head.weight` [K, H] |
| low rank (SlimSpec, 2605.10453) | and `draft_head_rank=r` | `lm_head.down.weight` [r, H], `lm_head.up.weight` [K, r] |
| trimmed (VocabTrim, 2506.22694), own or low rank | and `draft_vocab_size=K` | and `draft_ids` [K], ascending |

A trimmed head is always a copy of the target's rows held by the drafter (`training.vocabulary.initialize_head`), never
a slice kept at run time: a packed or offloaded target has no rows to slice, a session would pay the copy or hide it in
a cache, training could not move the rows, and every other engine wants `lm_head.weight` in the file.

K the drafter's vocabulary, V the target's. q is a softmax over the drafter's K logits, told with their target ids.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization

from .draft import Context, Law
from .drafters.base import Drafter, DrafterConfig, TargetView
from .parts import Part
from .verification import sample

if TYPE_CHECKING:
    from .confidence import ConfidenceHead
    from .correctors import Corrector
    from .drafters.block.predraft import PreDraft


class HeadConfig(DrafterConfig):
    """Fields of a family whose drafter has a vocabulary side. The family adds `hidden_size`, the width its head reads.

    own_head: whether the checkpoint holds a head; otherwise the target's is used.
    draft_head_rank: rank of an own head made of two factors, None for a dense one.
    draft_vocab_size: rows of an own head when they are a subset of the target's vocabulary.
    """

    own_head: bool = False
    draft_head_rank: int | None = None
    draft_vocab_size: int | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        for name, what in (("draft_vocab_size", "a reduced draft vocabulary"), ("draft_head_rank", "a low-rank head")):
            size = getattr(self, name)
            if size is not None and not self.own_head:
                raise ValueError(f"{what} ({name}) needs the drafter's own head (own_head=True)")
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        if self.own_head and self.vocab_size is None:
            raise ValueError("an own head needs vocab_size, the target's number of tokens")
        if (self.draft_vocab_size or 0) > (self.vocab_size or math.inf):
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is more than the target's vocabulary of {self.vocab_size}"
            )


class LowRankHead(nn.Module):
    """[..., H] -> [..., K] through r dimensions: r (H + K) weights in place of H K, no bias, nothing in between."""

    def __init__(self, hidden_size: int, rank: int, rows: int):
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, rows, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(self.down(hidden))


class HeadedDrafter(Drafter):
    """A drafter with a vocabulary side. A family calls `add_head` in its `__init__`, before `post_init`."""

    config: HeadConfig

    def add_head(self) -> None:
        """Make `lm_head` and `draft_ids` as the config says. Until they are loaded, or set by
        `training.vocabulary.initialize_head`, a head is random and `draft_ids` are the first K tokens."""
        config = self.config
        rows = config.draft_vocab_size or config.vocab_size
        if config.own_head and config.draft_head_rank:
            self.lm_head = LowRankHead(config.hidden_size, config.draft_head_rank, rows)
        elif config.own_head:
            self.lm_head = nn.Linear(config.hidden_size, rows, bias=False)
        # What a family's config may name.
        self.corrector: Corrector | None = None
        self.predraft: PreDraft | None = None
        self.confidence: ConfidenceHead | None = None  # likewise
        ids = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
        self.register_buffer("draft_ids", ids, persistent=True)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        # In code that is not its own, upstream passes over modules without parameters of their own, as most parts are.
        super()._initialize_weights(module, is_custom_code and not isinstance(module, Part))

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Part):
            module.init_weights()
        head = getattr(self, "lm_head", None)
        if isinstance(head, LowRankHead) and module in (head.down, head.up):
            initialization.normal_(module.weight, std=module.in_features**-0.5)  # unit variance stays unit variance

    def get_output_embeddings(self) -> nn.Module | None:
        """The own head, if it is one matrix."""
        head = getattr(self, "lm_head", None)
        return None if isinstance(head, LowRankHead) else head

    def check(self, view: TargetView) -> None:
        super().check(view)
        config = self.config
        remedy = f"load the target named in drafter.config.target_name ({config.target_name})"
        if not config.own_head and config.hidden_size != view.hidden_size:
            raise ValueError(
                f"drafter of hidden_size {config.hidden_size} borrows the head of a target of hidden_size "
                f"{view.hidden_size}; {remedy}, or give the drafter its own head (own_head=True)"
            )
        if self.draft_ids is not None and int(self.draft_ids.max()) >= view.vocab_size:
            raise ValueError(
                f"drafter proposes token {int(self.draft_ids.max())} but the target's vocabulary is {view.vocab_size}; "
                f"{remedy}"
            )

    @property
    def draft_token_ids(self) -> Tensor | None:
        return self.draft_ids

    def logits(self, view: TargetView, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., K] logits, by the own head or the target's; a whole vocabulary is no wider than V."""
        logits = self.lm_head(hidden) if self.config.own_head else view.head(hidden.to(view.dtype))
        # Rows that the target does not have are padding.
        return logits if self.draft_ids is not None else logits[..., : view.vocab_size]

    def target_ids(self, index: Tensor) -> Tensor:
        """Indices of the drafter's vocabulary -> target token ids."""
        return index if self.draft_ids is None else self.draft_ids[index]

    def spread(self, view: TargetView, values: Tensor, fill: float = -math.inf) -> Tensor:
        """[..., K] logits (or, with fill=0, probabilities) -> [..., V], `fill` where the drafter has no row."""
        if self.draft_ids is None:
            return F.pad(values, (0, view.vocab_size - values.shape[-1]), value=fill)
        return values.new_full((*values.shape[:-1], view.vocab_size), fill).index_copy_(-1, self.draft_ids, values)

    def warped(self, view: TargetView, logits: Tensor, context: Context) -> Tensor:
        """[..., K] logits -> float32 scores of the drafter's vocabulary under the request's warpers."""
        # Warpers are written for the target's vocabulary; a reduced or padded one takes part with -inf elsewhere.
        scores = context.warp(self.spread(view, logits))
        scores = scores[..., : logits.shape[-1]] if self.draft_ids is None else scores[..., self.draft_ids]
        # Warpers that leave nothing of this vocabulary: any law that is told exactly will do.
        return torch.where(scores.amax(-1, keepdim=True) == -math.inf, logits, scores).float()

    def draw(self, view: TargetView, logits: Tensor, context: Context) -> tuple[Tensor, Law]:
        """Target tokens [B, N] drawn from each node's logits [B, N, K] under the request's warpers, and their law."""
        # The law is the softmax over the rows there are: gathered from a softmax over V it would not sum to 1.
        probs = self.warped(view, logits, context).softmax(-1)
        drawn = sample(probs, torch.rand(probs.shape[:-1], device=probs.device))  # token 0 of a network that says NaN
        ids = None if self.draft_ids is None else self.draft_ids.expand_as(probs)
        return self.target_ids(drawn), Law(probs, ids, torch.ones(len(probs), dtype=torch.bool))


def read_vocabulary_map(
    state: dict[str, Tensor], rows: int, vocab_size: int, per_token: tuple[str, ...] = ("lm_head.weight",)
) -> bool:
    """Turn a published checkpoint's `d2t` and `t2d` into `draft_ids`, in place; whether there was a `d2t`.

    d2t: [K] int64, head row j is token j + d2t[j]. t2d: [V] bool, true for the same tokens; it may be absent. Head
    rows that are not in ascending order of their tokens are put in it, in all tensors that `per_token` names. Raises
    ValueError when the maps are broken.
    """
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    if d2t is None:
        return False
    ids = torch.arange(len(d2t)) + d2t.long()
    if len(ids) != rows or ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) != rows:
        raise ValueError(f"d2t does not map {rows} head rows to distinct tokens below {vocab_size}")
    state["draft_ids"], order = ids.sort()
    if t2d is not None and (len(t2d) != vocab_size or not torch.equal(t2d.nonzero().flatten(), state["draft_ids"])):
        raise ValueError("d2t and t2d name different tokens: the file's vocabulary mapping is broken")
    for name in per_token:
        if name in state and not torch.equal(ids, state["draft_ids"]):
            state[name] = state[name][order]
    return True


def vocabulary_map(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t` [K] int64 and `t2d` [V] bool of ascending `draft_ids` [K], the form other projects publish."""
    kept = torch.zeros(vocab_size, dtype=torch.bool, device=draft_ids.device)
    kept[draft_ids] = True
    return {"d2t": draft_ids - torch.arange(len(draft_ids), device=draft_ids.device), "t2d": kept}
