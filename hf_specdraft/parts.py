"""Parts of a drafter: modules with weights, options and training terms of their own, named by a field of its config."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor, nn

# The training terms that parts give, by name: whether they read the target's law.
PART_TERMS: dict[str, bool] = {}
# (teacher logits [a, S, K] or None, labels [a, S], mask [a, S]) -> the term's value at each slot [a, S]
Term = Callable[[Tensor | None, Tensor, Tensor], Tensor]


class Part(nn.Module):
    """A part. Its options are the keyword arguments of its `__init__` behind the drafter's config.

    terms: the training terms it gives (`Scored.terms`), by name, and whether each reads the target's law.
    """

    terms: dict[str, bool] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        PART_TERMS.update(cls.__dict__.get("terms", {}))

    def init_weights(self) -> None:
        """Set the weights that do not start as their modules do; by `transformers.initialization` alone, which leaves
        those that were loaded as they are. Called after the part's modules were initialised."""


Kind = TypeVar("Kind", bound=Part)


def build(what: str, kind: type[Kind], options: dict[str, Any] | None, *given: Any) -> Kind | None:
    """The part of a class that a config's field asks for by its options, made of them behind what is `given`; None for
    no options. what: how messages name the part. Raises ValueError for options that the class does not have.
    """
    if options is None:
        return None
    refuse_unknown(what, options, kind, len(given))
    return kind(*given, **options)


def named(package: str, path: Iterable[str], base: type) -> dict[str, type]:
    """Every subclass of `base` in a package's modules, by its own class attribute `name`."""
    found = {}
    for module in pkgutil.iter_modules(path):
        for _, member in inspect.getmembers(importlib.import_module(f"{package}.{module.name}"), inspect.isclass):
            if issubclass(member, base) and member.__dict__.get("name"):
                found[member.name] = member
    return found


def refuse_unknown(what: str, options: dict[str, Any], made_by: Callable, given: int) -> None:
    """Raise ValueError for options that `made_by` does not take behind its first `given` arguments."""
    accepted = list(inspect.signature(made_by).parameters)[given:]
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ValueError(f"{what} has no option {', '.join(unknown)}; it has {', '.join(accepted) or 'none'}")


@dataclass
class Scored:
    """What the slots of `a` anchors say in training.

    logits: [a, S, K] of the law that drafts, given the tokens before each slot: what objectives are about.
    base: [a, S, K] the same before correction, where there is a corrector ("base_" objectives).
    chosen: [a, S] index (of K) of the token that greedy drafting takes, given those before; None: argmax of logits.
    terms: further terms that parts give, by name.
    """

    logits: Tensor
    base: Tensor | None = None
    chosen: Tensor | None = None
    terms: dict[str, Term] = field(default_factory=dict)
