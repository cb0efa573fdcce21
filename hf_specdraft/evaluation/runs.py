"""One call of generate, measured."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class PassClock:
    """Counts and times the target's forward passes inside a `with` block, whatever loop makes them.

    seconds: duration of each pass. On an accelerator these are launch times, and no time split is drawn from them.
    lengths: tokens in the cache before each pass.
    """

    def __init__(self, target: Any):
        self.target = target
        self.seconds: list[float] = []
        self.lengths: list[int] = []

    def __enter__(self) -> PassClock:
        self._hooks = [
            self.target.register_forward_pre_hook(self._before, with_kwargs=True),
            self.target.register_forward_hook(self._after),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: Any, args: tuple, kwargs: dict) -> None:
        cache = kwargs.get("cache")
        self.lengths.append(0 if cache is None else int(cache.get_seq_length()))
        self._start = time.perf_counter()

    def _after(self, module: Any, args: tuple, output: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


@dataclass
class Run:
    """One call of generate with one row.

    ids: the new tokens. seconds: wall time of the call.
    passes: target passes after prefill; committed: tokens that these passes committed.
    prefill_seconds: the first pass.
    target_seconds, draft_seconds: time in forwards of target and drafter; None where it cannot be known from outside.
    speculation: the call's own statistics, where it has any.
    """

    ids: list[int]
    seconds: float
    passes: int
    committed: int
    prefill_seconds: float
    target_seconds: float | None
    draft_seconds: float | None
    speculation: Any = None


def run(
    target: Any,
    inputs: dict[str, Tensor],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    **arguments: Any,
) -> Run:
    """Generate for one row and measure. `arguments` go to generate (assistant_model=..., ...).

    temperature: 0 is greedy; above, the target's whole law at that temperature is sampled, from `seed`.
    """
    law = {"do_sample": False}
    if temperature:
        law = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(seed)
    prompt_length = inputs["input_ids"].shape[1]
    with PassClock(target) as clock:
        _synchronize()
        start = time.perf_counter()
        output = target.generate(
            **inputs, max_new_tokens=max_new_tokens, return_dict_in_generate=True, **law, **arguments
        )
        _synchronize()
        seconds = time.perf_counter() - start
    ids = output.sequences[0, prompt_length:].tolist()
    speculation = getattr(output, "speculation", None)
    on_cpu = target.device.type == "cpu"
    if speculation is not None:
        passes, committed = sum(speculation.rounds), sum(speculation.tokens) - len(speculation.tokens)
        target_seconds, draft_seconds = speculation.seconds["target"], speculation.seconds["draft"]
    else:
        # The second pass finds everything cached but the last committed token, which it reads.
        first = clock.lengths[1] - prompt_length + 1 if len(clock.lengths) > 1 else len(ids)
        passes, committed = len(clock.seconds) - 1, len(ids) - first
        target_seconds, draft_seconds = (sum(clock.seconds), 0.0) if on_cpu else (None, None)
    return Run(
        ids, seconds, passes, committed, clock.seconds[0], target_seconds, draft_seconds, speculation=speculation
    )


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def ratio(over: float, under: float) -> float:
    return over / under if under else math.nan
