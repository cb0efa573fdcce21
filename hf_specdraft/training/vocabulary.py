"""Which tokens a drafter's head has rows for, how many, and what the rows are before training.

Trimmed heads: VocabTrim, 2506.22694. Their size: 2603.05210, here against measured time, because operations are a poor
proxy for a projection that is bound by memory. Low-rank heads: SlimSpec, 2605.10453.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from ..drafters.base import TargetView, base_module
from ..heads import HeadedDrafter, LowRankHead
from .files import write_whole

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

# Rows of a head come in multiples of this, which suits kernels.
STEP = 128


# ---- which tokens ----


def count_answers(dataset: Dataset, vocab_size: int) -> Tensor:
    """[V] int64: how often each token occurs among the tokens that the target wrote.

    dataset: rows of `input_ids` and `loss_mask`. Raises ValueError when nothing is to be counted, or when ids lie
    outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for rows in dataset.select_columns(["input_ids", "loss_mask"]).iter(batch_size=1024):
        ids = np.fromiter(chain.from_iterable(rows["input_ids"]), dtype=np.int64)
        ids = ids[np.fromiter(chain.from_iterable(rows["loss_mask"]), dtype=bool)]
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(
                f"the answers hold token {ids.max()}, outside the target's vocabulary of {vocab_size}; they were "
                "written by another model, so write them anew with this target"
            )
        counts += np.bincount(ids, minlength=vocab_size)
    if not counts.any():
        raise ValueError("no token of the answers is marked as the target's own, so there is nothing to count")
    return torch.from_numpy(counts)


def control_tokens(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None = None) -> list[int]:
    """Tokens every draft vocabulary holds, whatever their counts: the tokenizer's special tokens, those that end or pad
    generation, the chat template's markers, and line breaks. Without its end token each answer ends in a rejection."""
    template = tokenizer.chat_template or ""
    template = template if isinstance(template, str) else " ".join(template.values())
    ids = set(tokenizer.all_special_ids)
    ids.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.content in template)
    ids.update(chain.from_iterable(tokenizer.encode(text, add_special_tokens=False) for text in ("\n", "\n\n")))
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        value = getattr(generation, name, None)
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return sorted(ids)


def ranked(counts: Tensor, always: Iterable[int] = ()) -> Tensor:
    """[V] all tokens in the order in which they are kept: `always` first, then by falling count, then by id."""
    first = torch.tensor(sorted(set(always)), dtype=torch.long)
    return counts.index_fill(0, first, torch.iinfo(counts.dtype).max).argsort(descending=True, stable=True)


def coverage(counts: Tensor, always: Iterable[int] = ()) -> Tensor:
    """[V] float64: entry K - 1 is the share of counted tokens within the K first of `ranked`. It bounds how many drafts
    of a head of K rows can be accepted."""
    return counts[ranked(counts, always)].cumsum(0) / counts.sum().double()


def unseen_coverage(first: Tensor, second: Tensor, always: Iterable[int] = ()) -> Tensor:
    """[V] float64: as `coverage`, of answers that were not counted, from the counts of two halves of the answers: each
    half within what the other would keep. Few answers cover themselves far better than any others."""
    shares = [b[ranked(a, always)].cumsum(0) / b.sum().double() for a, b in ((first, second), (second, first))]
    return torch.stack(shares).mean(0)


@dataclass
class Vocabulary:
    """The tokens of a trimmed head, and what they were chosen by.

    ids: [K] ascending target token ids. counts: [V] int64.
    """

    ids: Tensor
    counts: Tensor

    @classmethod
    def largest(cls, counts: Tensor, size: int, always: Sequence[int] = ()) -> Vocabulary:
        """The `size` tokens counted most often, `always` among them."""
        if not max(1, len(always)) <= size <= len(counts):
            raise ValueError(
                f"a draft vocabulary of {size} tokens is not between the {len(always)} that are always kept and the "
                f"target's {len(counts)}"
            )
        return cls(ranked(counts, always)[:size].sort().values, counts)

    @property
    def coverage(self) -> float:
        return float(self.counts[self.ids].sum() / self.counts.sum())

    def save(self, path: str | Path, **about: str) -> None:
        """Write a safetensors file with `draft_ids` [K] and `counts` [V]; `about` are its metadata. OSError, and no
        file, when that fails."""
        tensors = {"draft_ids": self.ids, "counts": self.counts}
        write_whole(Path(path), lambda place: save_file(tensors, place, metadata=about or None))

    @classmethod
    def load(cls, path: str | Path) -> Vocabulary:
        """Read what `save` wrote. Raises ValueError when the file is not such a one."""
        try:
            with safe_open(path, "pt") as file:
                found = cls(file.get_tensor("draft_ids"), file.get_tensor("counts"))
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} holds no draft vocabulary ({error}); make one with `hf-specdraft vocabulary`"
            ) from None
        ids = found.ids
        if (
            ids.dim() != 1
            or not len(ids)
            or bool((ids.diff() < 1).any())
            or not 0 <= ids[0] <= ids[-1] < len(found.counts)
        ):
            raise ValueError(f"{path}: draft_ids are not ascending tokens of a vocabulary of {len(found.counts)}")
        return found


def draft_vocabulary(setting: int | str | Path, counts: Callable[[], Tensor], always: Sequence[int] = ()) -> Vocabulary:
    """What a training config's `draft_vocab` names: a file of `Vocabulary.save`, or K for the K most frequent tokens.

    counts: gives the [V] counts of the training data; asked only when `setting` is a number.
    """
    return Vocabulary.largest(counts(), setting, always) if isinstance(setting, int) else Vocabulary.load(setting)


# ---- how many ----


class HeadTimes:
    """Seconds a draft spends at a head of any number of rows: measured at some, interpolated between, never falling."""

    def __init__(self, sizes: Sequence[int], seconds: Sequence[float]):
        self.sizes = np.asarray(sizes)
        self.seconds = np.maximum.accumulate(np.asarray(seconds, dtype=float))  # a larger head only seems faster

    def __call__(self, size: int) -> float:
        return float(np.interp(size, self.sizes, self.seconds))


def measure(function: Callable[[], Any], seconds: float = 0.2) -> float:
    """Least duration of a call (what else the machine does only adds to it), on as many threads as torch has; waits for
    an accelerator."""
    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=seconds).times)


@torch.inference_mode()
def measure_head(
    hidden_size: int,
    sizes: Sequence[int],
    positions: int,
    rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> HeadTimes:
    """Time what greedy drafting does at the head, for ascending `sizes`: the projection of `positions` hidden states,
    the likeliest token of each and its log-probability."""

    def draft(head: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        return logits.argmax(-1), logits.amax(-1) - logits.logsumexp(-1)

    hidden = torch.randn(1, positions, hidden_size, device=device, dtype=dtype)
    seconds = []
    for size in sizes:
        with torch.device(device):
            head = LowRankHead(hidden_size, rank, size) if rank else nn.Linear(hidden_size, size, bias=False)
        head = head.to(dtype)
        seconds.append(measure(lambda head=head: draft(head, hidden)))
    return HeadTimes(sizes, seconds)


@torch.inference_mode()
def measure_target(target: PreTrainedModel, tokens: int) -> float:
    """Seconds of one pass of the target over `tokens` new tokens: what verifying a draft of one fewer costs."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=target.device)
    return measure(lambda: target(ids, use_cache=False))


def speed(coverage: float, head: float, acceptance: float, depth: int, rest: float) -> float:
    """Tokens per second that drafting promises.

    acceptance: chance that a drafted token is accepted with the whole vocabulary. depth: tokens drafted a round.
    head: seconds a round spends at the drafter's head; rest: at everything else, the target's pass included.
    """
    a = acceptance * coverage
    return sum(a**i for i in range(depth + 1)) / (rest + head)


def linear(coverage: float, head: float, full: float, weight: float) -> float:
    """weight x coverage - (1 - weight) x the head's time as a share of the full head's (`full`, seconds)."""
    return weight * coverage - (1 - weight) * head / full


def smallest_size(covered: Tensor, minimum: float, always: int = 0) -> int:
    """The fewest rows whose coverage is at least `minimum`; coverage never falls, so the constraint is this bound.

    covered: [V] of `coverage`. always: how many tokens are kept in any case.
    """
    if not 0 <= minimum <= 1:
        raise ValueError(f"the least coverage must be between 0 and 1, got {minimum}")
    return max(1, always, int((covered < minimum - 1e-12).sum()) + 1)


def choose_size(
    utility: Callable[[int], float], smallest: int, largest: int, step: int = STEP, trials: int = 50, seed: int = 0
) -> int:
    """The size from `smallest` to `largest`, a multiple of `step` or `largest` itself, of the best utility that a
    search by a Tree-structured Parzen Estimator (optuna) finds.

    utility: from coverage and measured times it costs nothing, but it may as well be a run of real decoding.
    """
    import optuna

    def size_of(steps: int) -> int:
        return min(steps * step, largest)

    low, high = -(-smallest // step), -(-largest // step)
    # Sizes matter by their ratio. A bound that acts is the optimum itself, so both are looked at first.
    sampler = optuna.samplers.TPESampler(n_startup_trials=10, seed=seed)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for steps in sorted({low, high}):
            study.enqueue_trial({"steps": steps})
        study.optimize(lambda trial: utility(size_of(trial.suggest_int("steps", low, high, log=True))), n_trials=trials)
    finally:
        optuna.logging.set_verbosity(verbosity)
    return size_of(study.best_params["steps"])


# ---- the rows ----


@torch.no_grad()
def head_rows(view: TargetView, ids: Tensor | None = None) -> Tensor:
    """[K, H] a copy of the target's head rows for tokens `ids` [K] (all V by default), in the target's dtype.

    Read by passing the identity through the head, which also serves packed and offloaded weights. Raises ValueError
    for a head with a bias, which a drafter's has not.
    """
    width = view.hidden_size
    if bool(view.head(torch.zeros(1, width, device=view.device, dtype=view.dtype)).any()):
        raise ValueError(
            "the target's head has a bias, which a copy of its rows would lose; let the drafter borrow the head "
            "(own_head=False), or train an own head from random rows"
        )
    parts = []
    for chunk in torch.arange(width, device=view.device).split(256):
        columns = view.head(nn.functional.one_hot(chunk, width).to(view.dtype))[..., : view.vocab_size]  # [256, V]
        parts.append(columns if ids is None else columns[:, ids.to(columns.device)])
    return torch.cat(parts).T.contiguous()


@torch.inference_mode()
def head_states(target: PreTrainedModel, dataset: Dataset, tokens: int | None = None) -> Tensor:
    """[N, H] float32: what the target's head reads where the target wrote, in the first rows of a dataset.

    tokens: how many states to gather at least, if there are as many; by default 8 per dimension, enough for a moment.
    Packed documents see each other here, which moves a state but hardly the moment.
    """
    states: list[Tensor] = []
    head = base_module(target.get_output_embeddings())
    hook = head.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][0].float()))
    found: list[Tensor] = []
    try:
        for row in dataset.select_columns(["input_ids", "loss_mask"]):
            target(torch.tensor([row["input_ids"]], device=target.device), use_cache=False)
            own = torch.tensor(row["loss_mask"][1:], device=target.device)  # a token is foreseen one column earlier
            found.append(states.pop()[:-1][own])
            if sum(map(len, found)) >= (tokens or 8 * found[0].shape[1]):
                break
    finally:
        hook.remove()
    return torch.cat(found)


def factorize(rows: Tensor, rank: int, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """down [r, H] and up [K, r] whose product is nearest to `rows` [K, H] in the logits it gives: the truncated SVD of
    W C^(1/2), C the second moment of `hidden` [N, H] (by default the identity, which is the plain truncated SVD)."""
    weight = rows.double()
    width = weight.shape[1]
    if not 1 <= rank <= width:
        raise ValueError(f"the rank of a head must be between 1 and the hidden size {width}, got {rank}")
    root = inverse = torch.eye(width, dtype=torch.float64, device=rows.device)
    if hidden is not None:
        states = hidden.reshape(-1, width).to(weight)
        moment = states.T @ states / len(states)
        # Directions that no state has shown yet still count for a little.
        moment.diagonal().add_(1e-4 * moment.diagonal().mean())
        values, vectors = torch.linalg.eigh(moment)
        root, inverse = (vectors * values**power @ vectors.T for power in (0.5, -0.5))
    scaled = weight @ root
    # Right singular vectors of a tall matrix, from its [H, H] Gram matrix; eigh sorts them by rising value.
    squares, vectors = torch.linalg.eigh(scaled.T @ scaled)
    vectors = vectors[:, -rank:]
    size = squares[-rank:].clamp(min=squares[-1] * 1e-12).pow(0.25)  # S^(1/2): both factors share the scale
    return (size[:, None] * (vectors.T @ inverse)).to(rows.dtype), (scaled @ vectors / size).to(rows.dtype)


@torch.no_grad()
def initialize_head(
    drafter: HeadedDrafter, view: TargetView, ids: Tensor | None = None, hidden: Tensor | None = None
) -> None:
    """Start a drafter's own head from a copy of the target's; the target is left as it is.

    ids: [K] tokens of a trimmed head. hidden: [N, H] states such as the head will read (`head_states`), by which a
    low-rank head is fitted: without them SmolLM2-135M's of rank 144 agrees with the full head about 1.5 % of the
    likeliest tokens, with them about 56 %. Raises ValueError when head and target do not fit.
    """
    config = drafter.config
    if not config.own_head:
        raise ValueError("the drafter borrows the target's head, so there is none to start; set own_head=True")
    if config.hidden_size != view.hidden_size:
        raise ValueError(
            f"the drafter's head reads {config.hidden_size} values and the target's {view.hidden_size}, so rows cannot "
            "be copied; give the drafter the target's hidden_size"
        )
    tokens = view.vocab_size if ids is None else len(ids)
    if (ids is None) != (drafter.draft_ids is None) or tokens != (config.draft_vocab_size or config.vocab_size):
        raise ValueError(
            f"the drafter's head is made for {config.draft_vocab_size or config.vocab_size} tokens and "
            f"{'the target has' if ids is None else 'ids names'} {tokens}; set draft_vocab_size to match"
        )
    if ids is not None:
        ids = ids.sort().values
        drafter.draft_ids.copy_(ids)
    rows = head_rows(view, ids)
    if config.draft_head_rank is None:
        drafter.lm_head.weight.copy_(rows)
    else:
        down, up = factorize(rows.float(), config.draft_head_rank, hidden)
        drafter.lm_head.down.weight.copy_(down)
        drafter.lm_head.up.weight.copy_(up)


@torch.no_grad()
def trim(drafter: HeadedDrafter, ids: Tensor, view: TargetView | None = None) -> HeadedDrafter:
    """A copy of a trained drafter whose head has only the rows of target tokens `ids`, without training.

    view: the target, needed when the drafter borrows its head. Raises ValueError when the drafter lacks some of `ids`.
    """
    config, ids = drafter.config, ids.sort().values.cpu()
    state = drafter.state_dict()
    if config.own_head:
        own = torch.arange(config.vocab_size) if drafter.draft_ids is None else drafter.draft_ids.cpu()
        missing = ids[~torch.isin(ids, own)]
        if len(missing):
            raise ValueError(
                f"the drafter's head has no row for {len(missing)} of the {len(ids)} tokens, such as {int(missing[0])}"
            )
        name = "lm_head.up.weight" if config.draft_head_rank else "lm_head.weight"
        state[name] = state[name][torch.searchsorted(own, ids).to(state[name].device)]
    elif view is None:
        raise ValueError("the drafter borrows the target's head; give the target, whose rows are copied")
    else:
        state["lm_head.weight"] = head_rows(view, ids).to(drafter.device, drafter.dtype)
    state["draft_ids"] = ids
    fields = {"own_head": True, "draft_vocab_size": len(ids), "vocab_size": config.vocab_size or view.vocab_size}
    config = type(config).from_dict({**config.to_dict(), **fields})
    trimmed = type(drafter).from_pretrained(None, config=config, state_dict=state, dtype=drafter.dtype)
    return trimmed.to(drafter.device)
