"""AdaFlash checkpoints: plain DFlash files with a length head, whose settings stand in `dflash_config`."""

from __future__ import annotations

from torch import Tensor

# What says that there is a head of a kind, and its tensors' prefix.
HEADS = {
    "two_model": ("use_thresh_head_two_model", "thresh_head_two_model."),
    "subsequent": ("use_thresh_head_subsequent", "thresh_head_subsequent."),
}


def split(config: dict) -> tuple[dict, dict]:
    """A config.json -> what is left of it for the reader of plain DFlash, and the BlockConfig field of the head.

    Raises ValueError for both heads at once, and for the older head that predicts no length.
    """
    nested = dict(config.get("dflash_config") or {})
    kinds = [kind for kind, (key, _) in HEADS.items() if nested.pop(key, None)]
    bottleneck = nested.pop("thresh_head_bottleneck_dim", None)
    is_length = nested.pop("thresh_head_direct_len", None)
    if not kinds:
        return config, {}
    if len(kinds) > 1:
        raise ValueError(
            f"dflash_config: {' and '.join(HEADS[kind][0] for kind in kinds)} are both set; only one can be"
        )
    if not is_length:
        raise ValueError(
            "dflash_config: without thresh_head_direct_len the head predicts a threshold on probabilities, which is "
            "not supported; use a checkpoint whose head predicts the length"
        )
    options = {"kind": kinds[0]} | ({} if bottleneck is None else {"bottleneck": bottleneck})
    return {**config, "dflash_config": nested}, {"length_head": options}


def rename(state: dict[str, Tensor]) -> None:
    """Published tensor names -> ours, in place."""
    for _, prefix in HEADS.values():
        for name in [name for name in state if name.startswith(prefix)]:
            state["length_head." + name.removeprefix(prefix)] = state.pop(name)
