"""Parts that make the tokens of a parallel draft fit each other. A module in here is found by looking.

| name | what it adds | source |
| --- | --- | --- |
| markov | what the token before says, by a low-rank table (vanilla, gated, rnn) | DSpark 2607.05147 |
| gru | what a GRU over the block's tokens so far says | Domino 2605.29707 |
| lilicorr | how well neighbouring candidates fit, by attention among all of them | LiLiCorr 2608.20530 |
| selector | how well neighbouring candidates fit, by codes of each and the slot's state | DFlash 2, DCOCO |
| prefix_attention | what the token before says, in the light of the whole context | 2608.27339 |
| path | what the text so far says, by a search over its trigrams; nothing to train | DiffuSpec 2510.02358 |
"""

from __future__ import annotations

from functools import cache

from .. import parts
from .base import Corrector, Memory, Scores, State

__all__ = ["Corrector", "Memory", "Scores", "State", "build", "known"]


@cache
def known() -> dict[str, type[Corrector]]:
    """Every corrector by name: that of the class attribute `name`."""
    return parts.named(__name__, __path__, Corrector)


def build(config, options: dict) -> Corrector:
    """The corrector that `options` describe: {"name": ..., and its own}. Raises ValueError for unknown ones."""
    options = dict(options)
    name = options.pop("name", None)
    if name not in known():
        raise ValueError(f"corrector.name must be one of {', '.join(sorted(known()))}, got {name!r}")
    return parts.build(f"corrector {name}", known()[name], options, config)
