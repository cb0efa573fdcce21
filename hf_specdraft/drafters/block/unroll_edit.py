"""Training of editors (DEdit, 2609.38510): the masked pass, and passes over mixtures of what it said and the text.

| mix | a slot keeps the draft with chance |
| --- | --- |
| keep_confident | its probability: uncertain slots get clean neighbours, confident mistakes must be repaired |
| keep_uncertain | 1 - its probability |
| uniform | rho |
| all_draft | 1, as in decoding |
| all_gold | 0, which teaches to copy |

The others hold the text's token. Which of the first two the paper's ProposalMix is, it does not say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, distributed

from ...training.records import Unrolled
from .editing import Version, filled, refine
from .unroll_block import Reading

# (confidence [n, S], rho) -> the chance that a slot keeps what was drafted.
MIXES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "keep_confident": lambda confidence, rho: confidence,
    "keep_uncertain": lambda confidence, rho: 1 - confidence,
    "uniform": lambda confidence, rho: torch.full_like(confidence, rho),
    "all_draft": lambda confidence, rho: torch.ones_like(confidence),
    "all_gold": lambda confidence, rho: torch.zeros_like(confidence),
}
# Float32 logits that exist at a time where blocks are read for their tokens only.
CHUNK_BYTES = 256 * 2**20


def check(
    mix: str = "keep_confident", rho: float = 0.5, corruption: float = 0.0, third: float = 0.3, weight: float = 1.0
) -> None:
    """Raise ValueError for values that `unroll` has no use for."""
    if mix not in MIXES:
        raise ValueError(f"unroll.mode.mix must be one of {', '.join(MIXES)}, got {mix!r}")
    for name, share in (("rho", rho), ("corruption", corruption), ("third", third)):
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ValueError(f"unroll.mode.{name} is a share, from 0 to 1, got {share!r}")
    if not isinstance(weight, (int, float)) or weight < 0:
        raise ValueError(f"unroll.mode.weight must be a number, 0 or more, got {weight!r}")


def unroll(
    reading: Reading,
    generator: torch.Generator | None,
    mix: str = "keep_confident",
    rho: float = 0.5,
    corruption: float = 0.0,
    third: float = 0.3,
    weight: float = 1.0,
) -> Unrolled:
    """In training every anchor twice: drafted from masks, and edited from a mixture of that draft and the text. No
    gradient goes from the second into the first through the tokens; both send theirs into the context. All slots are
    taught: those that hold the text's token to keep it, those that hold an error to repair it.

    Metrics are of the masked pass in training. In evaluation each anchor stands once, edited as in decoding.

    mix, rho: what edit passes read, see the module. corruption: chance that a slot of it is replaced by a token drawn
        evenly from the drafter's vocabulary (DRLM): by that chance `CavityGate` knows what a token says for itself.
    third: chance, for a whole batch on all processes, of one more pass, over what the second said.
    weight: of the edit passes' slots, against 1 of the masked pass's.
    """
    drafter = reading.drafter
    if not drafter.training:
        return reading.unrolled(refined(reading).state[0])
    states = [reading.states(reading.masked())]
    once = reading.unrolled(states[0])
    best, confidence, _ = said(reading, states[0])
    keep = draw(best.shape, generator, best) < MIXES[mix](confidence, rho)
    # Behind the end of the text there is none to take the place of the draft, as in decoding.
    tokens = torch.where(keep | ~once.mask, drafter.target_ids(best), once.labels)
    if corruption:
        size = drafter.config.draft_vocab_size or reading.view.vocab_size
        noise = (draw(best.shape, generator, best) * size).long()
        noised = draw(best.shape, generator, best) < corruption
        tokens = torch.where(noised, drafter.target_ids(noise), tokens)
    states.append(reread(reading, tokens))
    if shared_chance(generator) < third:
        states.append(reread(reading, drafter.target_ids(said(reading, states[1])[0])))

    def repeated(values: Tensor) -> Tensor:
        return torch.cat([values] * len(states))

    edits = torch.arange(len(states), device=best.device).repeat_interleave(len(best)) > 0
    names = ("labels", "rows", "mask", "anchors", "previous")
    return replace(
        once,
        hidden=torch.cat(states),
        weight=torch.where(edits, weight, 1.0),
        drafts=~edits,
        **{name: repeated(getattr(once, name)) for name in names},
    )


def reread(reading: Reading, tokens: Tensor) -> Tensor:
    """The states [n, S, H] of a pass over the real blocks, their slots filled with `tokens` [n, S] (target ids)."""
    ids, real = reading.masked(), reading.blocks.real
    ids[real] = filled(ids[real][:, 0], tokens, reading.blocks.size)
    return reading.states(ids)


def refined(reading: Reading) -> Version:
    """The version, its state the states [n, S, H], that decoding would take each anchor's draft from."""
    drafter = reading.drafter

    def read(best: Tensor | None, last: bool) -> Version:
        ids = None if best is None else drafter.target_ids(best)
        hidden = reading.states(reading.masked()) if ids is None else reread(reading, ids)
        best, _, energy = said(reading, hidden, best)
        return Version(best, (hidden,), energy)

    return refine(drafter.config, read)


@torch.no_grad()
def said(reading: Reading, hidden: Tensor, fed: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What states [n, S, H] say: the best tokens [n, S] (indices of the drafter's vocabulary), their probabilities
    [n, S], and the energy [n] of the draft `fed` [n, S] that they have read, where there is one and a gate asks."""
    drafter, config = reading.drafter, reading.drafter.config
    gate = config.gate if fed is not None else None
    width = config.draft_vocab_size or reading.view.vocab_size
    size = max(1, CHUNK_BYTES // (4 * width * hidden.shape[1]))
    best, confidence, energy = [], [], []
    for start in range(0, max(1, len(hidden)), size):
        part = slice(start, start + size)
        logits = drafter.logits(reading.view, hidden[part])
        best.append(logits.argmax(-1))
        confidence.append((logits.amax(-1) - logits.float().logsumexp(-1)).exp())
        if gate is not None:
            energy.append(gate.energy(logits, fed[part], config.block_size - 1))
    return torch.cat(best), torch.cat(confidence), torch.cat(energy) if energy else None


def draw(shape: torch.Size, generator: torch.Generator | None, like: Tensor) -> Tensor:
    """Uniform numbers from the CPU, so that a seed gives the same ones on every device."""
    return torch.rand(shape, generator=generator).to(like.device)


def shared_chance(generator: torch.Generator | None) -> float:
    """One uniform number, the first process's on all: with sharded weights they must make equally many passes."""
    chance = [float(torch.rand((), generator=generator))]
    if distributed.is_available() and distributed.is_initialized():
        distributed.broadcast_object_list(chance, src=0)
    return chance[0]
