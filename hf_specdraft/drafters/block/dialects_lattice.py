"""DFlash 2 and LiLiCorr checkpoints: plain DFlash files with parts, whose settings stand in `dflash_config`.

| | DFlash 2 | LiLiCorr |
| --- | --- | --- |
| architecture | DFlash2DraftModel | LiLiCorrDraftModel |
| projector_type | dflash2 | lilicorr |
| convolutions (`layers.N.{attention,mlp}_conv`) | always | where the settings name them |
| corrector | `candidate_selector` | `lilicorr` |
"""

from __future__ import annotations

from torch import Tensor

NAMES = {"dflash2": "DFlash 2", "lilicorr": "LiLiCorr"}
ARCHITECTURES = {"DFlash2DraftModel": "dflash2", "LiLiCorrDraftModel": "lilicorr"}
PREFIXES = ("candidate_selector.", "lilicorr.")


def split(config: dict) -> tuple[dict, dict]:
    """A config.json -> what is left of it for the reader of plain DFlash, and the parts' BlockConfig fields.

    A config of neither kind comes back as it is. Raises ValueError for settings that are missing: those that change no
    shape (logit_scale, vector_eps) would else be guessed in silence.
    """
    nested = dict(config.get("dflash_config") or {})
    architecture = ARCHITECTURES.get((config.get("architectures") or [""])[0])
    kind = nested.get("projector_type") or config.get("projector_type") or architecture
    if architecture not in (None, kind):
        raise ValueError(
            f"the checkpoint is a {NAMES[architecture]} by its architecture but projector_type is {kind!r}"
        )
    if kind not in NAMES:
        return config, {}

    def take(key: str):
        if nested.get(key) is None:
            raise ValueError(f"the checkpoint is a {NAMES[kind]} drafter, but its dflash_config lacks {key!r}")
        return nested.pop(key)

    fields = {}
    convolved = [key for key in ("conv_kernel_size", "conv_group_size") if nested.get(key) is not None]
    if convolved or kind == "dflash2":
        fields["convolution"] = {"taps": take("conv_kernel_size"), "group_size": take("conv_group_size")}
    if kind == "dflash2":
        fields["corrector"] = {"name": "selector", "top_k": take("selector_top_k"), "rank": take("selector_rank")}
    else:
        if nested.pop("lilicorr_enabled", True) is not True:
            raise ValueError("dflash_config: lilicorr_enabled is false, but projector_type is 'lilicorr'")
        fields["corrector"] = {
            "name": "lilicorr",
            "top_k": take("lilicorr_candidate_topk"),
            "hidden_size": nested.pop("lilicorr_hidden_size", None) or None,
            **{
                option: take(f"lilicorr_{option}")
                for option in ("factor_dim", "num_layers", "num_heads", "mlp_ratio", "logit_scale", "vector_eps")
            },
        }
    nested.pop("projector_type", None)
    plain = {key: value for key, value in config.items() if key != "projector_type"}
    return {**plain, "architectures": ["DFlashDraftModel"], "dflash_config": nested}, fields


def rename(state: dict[str, Tensor]) -> None:
    """The correctors' tensors as ours, in place."""
    for name in list(state):
        for prefix in PREFIXES:
            if name.startswith(prefix):
                state["corrector." + name.removeprefix(prefix)] = state.pop(name)
