"""Readers of published checkpoints: their config keys and tensor names -> BlockConfig and the internal names.

Dialects differ silently: a wrong guess leaves the text right and the drafts useless. So every key must be read or be
known not to matter, every tensor must find its place, and what cannot be told from the checkpoint is refused.

| | z-lab, SpecForge | transformers | DeepSpec | speculators |
| --- | --- | --- | --- | --- |
| layer ids | of the layer | of the layer | of the layer | of hidden_states: one more |
| slots that draft | 1.. | 1.. | 0.. | 1.., or 0.. by `sample_from_anchor` |
| embedding, head | the target's | the target's | own | own, head perhaps reduced by `d2t` |
| sliding layers | `sliding_rule` none or "query" | "distance" | none | "anchor" |

Heads behind the block: DSpark's (Markov, confidence) in SpecForge's, DeepSpec's and speculators' files, Domino's in
SpecForge's. SpecForge's DSpark and, by `shift_label`, Domino draft from slot 0. Parts that no layout above knows:
`dialects_lattice` (LiLiCorr, DFlash 2), `dialects_specfloor` (prefix attention), `dialects_length` (AdaFlash).
"""

from __future__ import annotations

from torch import Tensor

from ...heads import read_vocabulary_map
from ..checkpoints import HUB_KEYS, Keys, network_fields, read_tensors
from . import dialects_lattice, dialects_length, dialects_specfloor


def dialect_of(config: dict) -> str | None:
    """The DFlash-lineage dialect of a config.json, None if it is none."""
    architecture = (config.get("architectures") or [""])[0]
    if "speculators_model_type" in config:
        return "speculators" if config["speculators_model_type"] in ("dflash", "dspark") else None
    if config.get("model_type") == "muse_glimmer_assistant":
        return "transformers"
    if architecture in ("DFlashDraftModel", "DominoDraftModel", "DSparkDraftModel", *dialects_lattice.ARCHITECTURES):
        return "z-lab"
    if architecture.endswith("DSparkModel") and "dflash_config" in config:
        return "z-lab"  # SpecForge's, normalised for serving
    if architecture.endswith("DSparkModel") or ("num_anchors" in config and "mask_token_id" in config):
        return "deepspec"
    return None


def read(name_or_path, config: dict, fields: dict, hub: dict) -> tuple[dict, dict[str, Tensor]]:
    """BlockConfig fields and state dict of a checkpoint in a published dialect.

    fields: BlockConfig fields that overrule the reader's. hub: keyword arguments of from_pretrained, of which those
    that locate files are used. Raises ValueError for what cannot be told or done, OSError for missing files.
    """
    config, parts = dialects_lattice.split(config)
    config, head = dialects_length.split(config)
    keys = Keys(config)
    dialect = {"z-lab": _zlab, "transformers": _transformers, "deepspec": _deepspec, "speculators": _speculators}
    state = read_tensors(name_or_path, **{key: hub[key] for key in HUB_KEYS if key in hub})
    dialects_lattice.rename(state)
    dialects_length.rename(state)
    values = dialect[dialect_of(config)](keys, state)
    keys.close()
    values = {"dtype": config.get("dtype") or config.get("torch_dtype"), **values, **parts, **head, **fields}
    if values.get("sliding_rule", "") is None:
        raise ValueError(
            "this layout is written by z-lab (whose reference gives the window of sliding layers no effect) and by "
            "SpecForge (which trains them with it, causal in the block), and this file does not tell which; pass "
            "sliding_rule='unbounded' for the former, sliding_rule='query' and sliding_causal=True for the latter"
        )
    if values.get("anchor_drafts", "") is None:
        raise ValueError(
            "dflash_config lacks 'shift_label', and Domino is trained either way; pass anchor_drafts=True if slot 0 "
            "predicts the token after the anchor (shift_label true), anchor_drafts=False if slot 1 does"
        )
    return values, state


def _dspark(keys: Keys, state: dict) -> dict:
    """DSpark's heads, their tensors renamed to ours."""
    rank, kind = keys.take("markov_rank", 0), keys.take("markov_head_type", "vanilla")
    sure, with_markov = keys.take("enable_confidence_head", False), keys.take("confidence_head_with_markov", False)
    keys.take("confidence_head_alpha", None)  # its weight in training
    fields = {}
    if rank:
        head = dialects_specfloor.prefix_attention(keys) if kind == "attn" else {"name": "markov", "kind": kind}
        fields["corrector"] = {**head, "rank": rank}
        _rename(state, "markov_head.", "corrector.")
    if sure:
        fields["confidence"] = {"with_markov": with_markov}
        _rename(state, "confidence_head.", "confidence.")
    return fields


def _domino(keys: Keys, nested: Keys, state: dict) -> dict:
    """Domino's head, its tensors renamed to ours."""
    ranks = {source.take("emb_dim") for source in (keys, nested) if "emb_dim" in source}
    if len(ranks) != 1:
        raise ValueError(f"emb_dim must be given once, at the top or in dflash_config; found {sorted(ranks)}")
    for name in ("prefix_gru.", "embed_proj."):
        _rename(state, name, f"corrector.{name}")
    options = {"hidden_size": nested.take("gru_hidden_dim"), "free_slots": nested.take("pure_draft_prefix_len")}
    return {
        "corrector": {"name": "gru", "rank": ranks.pop(), **options},
        "anchor_drafts": nested.take("shift_label", None),
    }


def _rename(state: dict, theirs: str, ours: str) -> None:
    """Tensors whose names begin with `theirs`, in older files of SpecForge behind "logit_head."."""
    for name in list(state):
        bare = name.removeprefix("logit_head.")
        if bare.startswith(theirs):
            state[ours + bare.removeprefix(theirs)] = state.pop(name)


def _zlab(keys: Keys, state: dict) -> dict:
    architecture = keys.take("architectures", [""])[0]
    nested = keys.part("dflash_config")
    default = {"DSparkDraftModel": "dspark", "DominoDraftModel": "domino"}.get(architecture, "dflash")
    if architecture.endswith("DSparkModel"):
        default = "dspark"
    projector = nested.take("projector_type", default)
    values = {}
    if projector == "dspark":
        # The form normalised for serving has the heads' settings at the top.
        values = {"anchor_drafts": True, **_dspark(keys if "markov_rank" in keys else nested, state)}
    elif projector == "domino":
        values = _domino(keys, nested, state)
    elif projector != "dflash":
        raise ValueError(f"dflash_config: projector_type = {projector!r} is not supported")
    block_sizes = {source.take("block_size") for source in (keys, nested) if "block_size" in source}
    if len(block_sizes) != 1:
        raise ValueError(f"block_size must be given once, at the top or in dflash_config; found {sorted(block_sizes)}")
    for source in (keys, nested):
        source.expect("projector_type", projector)
        source.expect("causal", False)
        source.expect("is_causal", False)
        source.expect("attention_mode", "gqa")
        source.expect("markov_rank", 0)
        source.expect("enable_confidence_head", False)
    vocab_size = keys.take("vocab_size", None)
    keys.expect("draft_vocab_size", vocab_size)
    # Only SpecForge writes both styles of rope keys; files of transformers 4, z-lab's own, have but the older.
    both_styles = "rope_parameters" in keys and "rope_theta" in keys
    rule = "query" if both_styles else None if "rope_parameters" in keys else "unbounded"
    values |= network_fields(keys)
    if "sliding_attention" not in values["layer_types"]:
        rule = "unbounded"
    values |= {
        "vocab_size": vocab_size,
        "block_size": block_sizes.pop(),
        "mask_token_id": nested.take("mask_token_id"),
        "target_layer_ids": nested.take("target_layer_ids"),
        "num_target_layers": keys.take("num_target_layers", None),
        "sliding_rule": rule,
        "sliding_causal": rule == "query",
    }
    nested.close()
    return values


def _transformers(keys: Keys, state: dict) -> dict:
    for ours, theirs in (("fc", "encoder.fc"), ("hidden_norm", "encoder.output_norm_enc")):
        if f"{theirs}.weight" in state:
            state[f"{ours}.weight"] = state.pop(f"{theirs}.weight")
    if "layer_types" not in keys:
        raise ValueError("config.json lacks 'layer_types', without which the drafter cannot be told")
    return network_fields(keys, default_theta=500000.0) | {
        "block_size": keys.take("block_size"),
        "mask_token_id": keys.take("mask_token_id"),
        "target_layer_ids": keys.take("target_layer_ids"),
        "skip_embed_norm": True,
        "sliding_rule": "distance",
    }


def _deepspec(keys: Keys, state: dict) -> dict:
    values = _dspark(keys, state) | dialects_specfloor.backbone(keys, state) | network_fields(keys)
    if keys.take("tie_word_embeddings", False) and "lm_head.weight" not in state and "embed_tokens.weight" in state:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    # Attention is full in every layer whatever the config says: the trainer builds no other mask.
    values["layer_types"] = ["full_attention"] * values["num_hidden_layers"]
    return values | {
        "vocab_size": keys.take("vocab_size"),
        "block_size": keys.take("block_size"),
        "mask_token_id": keys.take("mask_token_id"),
        "target_layer_ids": keys.take("target_layer_ids"),
        "num_target_layers": keys.take("num_target_layers", None),
        "anchor_drafts": True,
        "own_embeddings": True,
        "own_head": True,
    }


def _speculators(keys: Keys, state: dict) -> dict:
    algorithm = keys.take("speculators_model_type")
    keys.take("speculators_version", None)
    method = keys.part("speculators_config")
    method.expect("algorithm", algorithm)
    method.take("proposal_methods", None)
    method.take("default_proposal_method", None)
    verifier = method.take("verifier", {})
    method.close()
    network = keys.part("transformer_layer_config")
    values = network_fields(network)
    vocab_size = network.take("vocab_size")
    network.close()
    values |= _dspark(keys, state)
    draft_vocab_size = keys.take("draft_vocab_size", vocab_size)
    target_hidden_size = keys.take("target_hidden_size", values["hidden_size"])
    ids = [index - 1 for index in keys.take("aux_hidden_state_layer_ids")]
    # Trained files list the state that training takes its labels from behind those that `fc` reads.
    if "fc.weight" in state and state["fc.weight"].shape[1] == (len(ids) - 1) * target_hidden_size:
        ids.pop()
    reduced = read_vocabulary_map(state, draft_vocab_size, vocab_size, ("lm_head.weight", "corrector.markov_w2.weight"))
    if not reduced and draft_vocab_size != vocab_size:
        raise ValueError(
            f"the drafter's head has {draft_vocab_size} rows for a vocabulary of {vocab_size}, but the file has no "
            "'d2t' to say which tokens they are"
        )
    return values | {
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size if reduced else None,
        "block_size": keys.take("block_size"),
        "mask_token_id": keys.take("mask_token_id"),
        "target_layer_ids": ids,
        "target_hidden_size": target_hidden_size,
        "target_name": verifier.get("name_or_path"),
        "anchor_drafts": keys.take("sample_from_anchor", algorithm == "dspark"),
        "sliding_rule": "anchor",
        "sliding_causal": not keys.take("sliding_window_non_causal", False),
        "own_embeddings": True,
        "own_head": True,
    }
