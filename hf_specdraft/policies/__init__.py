"""How deep to draft, what to verify, and whether drafting pays at all. A module in here is found by looking.

Costs are measured once per target, drafter and kind of call, and kept for the life of the process; no decision is made
before they are known, and every decision compares counts, never the clock, so that a seed reproduces an output.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from typing import Any

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
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for _, member in inspect.getmembers(importlib.import_module(f"{__name__}.{module.name}"), inspect.isclass):
            if issubclass(member, Policy) and member.__dict__.get("name"):
                found[member.name] = member
    return found


def check(policy: str | dict[str, Any]) -> None:
    """Raise ValueError for a policy that is not known, or options that it does not have."""
    options = dict(policy) if isinstance(policy, dict) else {"name": policy}
    name = options.pop("name", None)
    if name in BUILT_IN and not options:
        return
    if name not in known():
        raise ValueError(f"policy must be one of {', '.join((*BUILT_IN, *sorted(known())))}, got {name!r}")
    accepted = list(inspect.signature(known()[name].__init__).parameters)[2:]
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ValueError(f"policy {name} has no option {', '.join(unknown)}; it has {', '.join(accepted) or 'none'}")


def threshold_of(settings: Settings, drafter: Any) -> Threshold | None:
    """The stop by confidence that the caller asks for, or else the drafter's config."""
    threshold = settings.confidence_threshold or getattr(drafter.config, "confidence_threshold", 0.0)
    return Threshold(threshold) if threshold else None


def make(policy: str | dict[str, Any], situation: Situation) -> Policy:
    """The policy of one call, which `check` has let pass."""
    options = dict(policy) if isinstance(policy, dict) else {"name": policy}
    return known()[options.pop("name")](situation, **options)
