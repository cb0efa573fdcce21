"""How deep to draft, what to verify, and whether drafting pays at all. A module in here is found by looking.

| name | decides | looks at | source |
| --- | --- | --- | --- |
| auto | whether and how deep to draft; what to verify | past rounds, costs, ratings | CaDDTree 2606.01813 |
| fixed | lengths: always the same, or 2 more after a full success, else 1 less | past rounds | transformers |
| hf_threshold | where a draft ends | the tokens so far and their laws | transformers |
| svip | where a draft ends | laws of the tokens so far | SVIP 2411.18462 |
| kangaroo | where a draft ends | laws of the tokens so far | Kangaroo 2404.18911 |
| cost_aware | where a draft ends | laws of the tokens so far, costs | ours |
| specdecpp | where a draft ends | the drafter's states after the tokens before the latest | SpecDec++ 2405.19715 |
| failfast | whether a draft goes on by another block (token) | chances of the tokens so far | FailFast |
| speckv | each row's length | laws of past drafts, costs | SpecKV 2605.02888 |
| adl | each row's length | past rounds | DiffuSpec 2510.02358 |
| adaflash | how much of a block to verify | the block's states, which no drawn token entered | AdaFlash 2607.19223 |
| confidence | how much of a row to verify | its confidences up to each slot | DSpark 2607.05147 |
| dspark | how much of a row to verify | its confidences up to each slot, costs | DSpark 2607.05147 |
| dspark_batch | what of a batch to verify | confidences up to the first drop, prices | DSpark 2607.05147 |
| d_cut | what of a batch to verify | all confidences (drawn rows become point rows), prices | D-Cut 2607.14647 |
| forespark | how much to draft and to verify of a batch | past rounds or `outlook`; then as dspark_batch | ForeSpark |

What a decision may have seen without bending the output's law: see `base.Policy`.

Costs (of one kind of call, while it runs) and prices (of passes of any size, beforehand) are measured once per target
and drafter, and kept for the life of the process. No decision is made before they are known, and every decision
compares counts, never the clock, so that a seed reproduces an output.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from .. import parts
from .base import Policy, Situation
from .costs import Costs, costs_of, nominal_costs
from .fixed import FixedLength
from .pays_off import PaysOff
from .settings import Settings
from .stop_rules import Threshold

__all__ = [
    "Costs",
    "FixedLength",
    "PaysOff",
    "Policy",
    "Settings",
    "Situation",
    "Threshold",
    "check",
    "costs_of",
    "known",
    "make",
    "nominal_costs",
    "threshold_of",
]
# Made by the loop itself, which knows what they need.
BUILT_IN = ("auto", "fixed")


@cache
def known() -> dict[str, type[Policy]]:
    """Every policy that a config's `policy` may name beside `BUILT_IN`."""
    return parts.named(__name__, __path__, Policy)


def check(policy: str | dict[str, Any]) -> None:
    """Raise ValueError for a policy that is not known, options that it does not have, or values it has no use for."""
    name, options = parsed(policy)
    if name in BUILT_IN and not options:
        return
    if not isinstance(name, str) or name not in known():
        raise ValueError(f"policy must be one of {', '.join((*BUILT_IN, *sorted(known())))}, got {name!r}")
    accepted = list(inspect.signature(known()[name].__init__).parameters.values())[2:]
    parts.refuse_unknown(f"policy {name}", options, known()[name], 1)
    values = {option.name: option.default for option in accepted} | options
    try:
        known()[name].check(**values)
    except TypeError as error:  # text in the place of a number
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise ValueError(f"policy {name} was given a value of a wrong kind among {given}: {error}") from None


def parsed(policy: str | dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The name and the options of a policy as a config has it."""
    options = dict(policy) if isinstance(policy, dict) else {"name": policy}
    return options.pop("name", None), options


def threshold_of(settings: Settings, drafter: Any) -> Threshold | None:
    """The stop by confidence that the caller asks for, or else the drafter's config."""
    threshold = settings.confidence_threshold
    if threshold is None:
        threshold = getattr(drafter.config, "confidence_threshold", 0.0)
    return Threshold(threshold) if threshold else None


def make(policy: str | dict[str, Any], situation: Situation) -> Policy:
    """The policy of one call, one of `known`. Raises ValueError as `check` does: a config's field may be set later."""
    check(policy)
    name, options = parsed(policy)
    return known()[name](situation, **options)
