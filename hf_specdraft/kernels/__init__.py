"""Attention over a draft tree, and fused chain verification: one name each, the best implementation for the tensors.

Three implementations per operation: `reference` is the definition (slow, obvious, float64), `fallback` runs everywhere
on PyTorch's own operators, `triton` runs on GPUs. The first of `_CHOICES` that does not refuse is taken; `why()` says
which one that was and who refused before it. `use("reference")` forces one, for tests and for acquitting a kernel.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ..draft import Law

__all__ = ["ATTENTION_NAME", "tree_attention", "use", "verify_chain", "why"]

logger = logging.getLogger(__name__)

# Wider heads do not fit the 99 KiB of shared memory of a consumer GPU in the kernel's tiling.
_MAX_HEAD_BYTES = 512

_forced: ContextVar[str | None] = ContextVar("hf_specdraft_kernels_forced", default=None)
_chosen: dict[str, str] = {}


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton_refuses(operation: str, tensor: Tensor) -> str | None:
    """Why the Triton kernels cannot take `tensor` (the query, or the logits), None when they can."""
    if not _has_triton():
        return "triton is not installed"
    if not tensor.is_cuda:
        return f"the tensors are on {tensor.device.type}"
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"no kernel for {tensor.dtype}"
    if torch.is_grad_enabled() and tensor.requires_grad:
        return "the kernels have no backward pass"
    if operation == "tree_attention" and tensor.shape[-1] * tensor.element_size() > _MAX_HEAD_BYTES:
        return f"heads of {tensor.shape[-1]} x {tensor.dtype} are wider than {_MAX_HEAD_BYTES} bytes"
    return None


def _never_refuses(operation: str, tensor: Tensor) -> None:
    return None


_CHOICES: list[tuple[Callable[[str, Tensor], str | None], str]] = [
    (_triton_refuses, "triton"),
    (_never_refuses, "fallback"),
]
# Imported when chosen, so that nobody pays for, or trips over, a compiler that is not used.
_MODULES = {
    ("tree_attention", "reference"): "reference",
    ("tree_attention", "fallback"): "sdpa",
    ("tree_attention", "triton"): "triton_tree_attention",
    ("verify_chain", "reference"): "reference",
    ("verify_chain", "fallback"): "sdpa",
    ("verify_chain", "triton"): "triton_verify",
}


@functools.cache
def _log_once(text: str) -> None:
    logger.info(text)


def _implementation(operation: str, tensor: Tensor) -> Callable:
    name, refusals = _forced.get(), []
    if name is not None:
        reason = "forced by use()"
    else:
        for refuses, name in _CHOICES:
            refusal = refuses(operation, tensor)
            if refusal is None:
                break
            refusals.append(f"{name} refused: {refusal}")
        reason = "; ".join(refusals) or "first choice"
    _chosen[operation] = f"{name} ({reason})"
    _log_once(f"{operation}: {_chosen[operation]}")
    return getattr(importlib.import_module(f".{_MODULES[operation, name]}", __name__), operation)


@contextmanager
def use(name: str) -> Iterator[None]:
    """Force `reference`, `fallback` or `triton` within the block (this thread or task only), asking no predicate.

    Raises ValueError for another name. Triton on CPU tensors works only under Triton's interpreter (TRITON_INTERPRET=1
    before triton is first imported).
    """
    names = sorted({implementation for _, implementation in _MODULES})
    if name not in names:
        raise ValueError(f"no kernels named {name!r}; there are {', '.join(names)}")
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)


def why() -> dict[str, str]:
    """For each operation called so far: the implementation of its latest call, and the reason for the choice."""
    return dict(_chosen)


def tree_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of a tree's rows over the context and over their ancestors.

    The mask says everything: padding, sliding windows (by position, so a node's depth counts), ancestors. It is taken
    as the loop builds it, once per pass for all layers; reading it costs a GPU 1 byte per row and column and key/value
    head, against 4 * D bytes of half-precision keys and values per column. Passing context mask, ancestors, depths and
    window instead would save those bytes and let the kernel and the mask disagree.

    query: [B, Hq, N, D], rows in node order, the anchor first.
    key, value: [B, Hkv, C, D] and [B, Hkv, C, Dv], C columns of context and tree; Hkv divides Hq, and query head h uses
        key head h // (Hq / Hkv). Masked columns must be finite.
    mask: [B, 1, N, C] bool, True where row n sees column c. A row that sees nothing gets zeros.
    scale: factor on the scores.
    Returns [B, Hq, N, Dv] in the query's dtype.
    """
    return _implementation("tree_attention", query)(query, key, value, mask, scale)


def verify_chain(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    *,
    greedy: bool,
    temperature: float = 1.0,
    law: Law | None = None,
    accept_uniforms: Tensor | None = None,
    emit_uniforms: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """How many drafted tokens of each chain the target accepts, and the token it emits after them.

    Greedy: a token is accepted while it is the argmax (lowest id on a tie) of its row. Sampling, with p the softmax of
    row i and q the law token x_i was drawn from (all mass on x_i for a point row): accept while
    accept_uniforms[i] * q(x_i) < p(x_i) and q(x_i) > 0; after a rejection emit from norm((p - q)+), or from p if only
    rounding is left of it; after a full acceptance emit from the next row's p (Leviathan et al. 2211.17192, algorithm
    1). The emitted token is the first id whose cumulated weight exceeds emit_uniforms times the total, so that every
    implementation draws the same token from the same uniforms, rounding at the edges of that sum aside. Drawn rows get
    what `verification.walk` gives them for these uniforms.

    logits: [B, N+1, V] any float dtype, processed as generate would but for `temperature`; row 0 scores the first
        token. Never copied to float32 as a whole, except by the reference.
    tokens: [B, N] int64. lengths: [B] int64, how many of them are real. What the others hold does not matter.
    temperature: the logits are divided by it; leave 1 when the processors did that already.
    law: the draft's law; its rows that were not drawn, and None, are point rows.
    accept_uniforms: [B, N] and emit_uniforms: [B], float in [0, 1); not read when greedy.
    Returns accepted [B] and next_token [B], int64, on the logits' device.
    Raises ValueError for a temperature that is not positive, or when sampling without uniforms.
    """
    if not greedy and temperature <= 0:
        raise ValueError(f"temperature must be positive to sample, got {temperature}; ask for greedy instead")
    if not greedy and (accept_uniforms is None or emit_uniforms is None):
        raise ValueError("sampling needs accept_uniforms [B, N] and emit_uniforms [B]")
    device = logits.device
    tokens, lengths = tokens.to(device), lengths.to(device)
    # Padding may hold any id; a valid one lets the implementations gather without asking.
    tokens = tokens.masked_fill(torch.arange(tokens.shape[1], device=device) >= lengths[:, None], 0)
    if greedy:
        law = accept_uniforms = emit_uniforms = None
    else:
        accept_uniforms, emit_uniforms = accept_uniforms.to(device), emit_uniforms.to(device)
    if law is not None:
        ids = None if law.ids is None else law.ids.to(device)
        law = Law(law.probs.to(device), ids, law.rows.to(device), law.replacement)
    return _implementation("verify_chain", logits)(
        logits,
        tokens,
        lengths,
        greedy=greedy,
        temperature=temperature,
        law=law,
        accept_uniforms=accept_uniforms,
        emit_uniforms=emit_uniforms,
    )


# Last, because it uses tree_attention: makes ATTENTION_NAME loadable as a model's attn_implementation.
from .interface import ATTENTION_NAME  # noqa: E402
