"""The one internal form of every DFlash dialect."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...heads import HeadConfig
from .editing import CavityGate
from .of_target import ROPE_TYPES, mask_token_for, network_like, tapped_layers

# What the window of a "sliding_attention" layer hides (positions are absolute, W = sliding_window, i query, j key).
SLIDING_RULES = {
    "unbounded": "nothing (z-lab's reference, whose sdpa and eager paths ignore the window)",
    "distance": "|i - j| > W (transformers)",
    "anchor": "context before anchor - W, for every slot (speculators)",
    "query": "j < i - (W - 1) (SpecForge training)",
}


class BlockConfig(HeadConfig):
    """DFlash (2602.06036): a small block-diffusion drafter that reads the target's hidden states.

    The network is Qwen3's (per-head q/k norms) with keys and values of the context in front of each layer's own.

    block_size: B, the anchor slot and B - 1 masks, as trained. Drafts are cut from the full block: later masks
        influence earlier slots.
    short_blocks: smaller sizes that it was trained at as well (unroll mode "short"); a draft is cut from the smallest
        that holds it. None: always from the full block.
    anchor_drafts: whether slot k predicts the token at anchor + 1 + k (B drafts; DeepSpec) instead of the token at
        anchor + k with slot 0 unused (B - 1 drafts; z-lab).
    mask_token_id: fills the block's open slots.
    target_layer_ids: zero-based target layers whose OUTPUT is read, in order; -1 is the embedding output.
    reads_final: read the state that the target's head reads (after the final norm) as well, behind the others. No
        published DFlash does; it tells most of the next token. Needs num_target_layers.
    target_hidden_size: the target's hidden size, None when it equals `hidden_size`.
    num_target_layers: depth of the target the drafter was made for, None when the checkpoint does not say.
    own_embeddings: whether the checkpoint holds them; otherwise the target's are used.
    skip_embed_norm: whether a borrowed embedding's `embed_norm` (Muse targets) is left out, as transformers does.
    layer_types: "full_attention" or "sliding_attention" per layer.
    sliding_rule: what the window of sliding layers hides, a key of SLIDING_RULES.
    sliding_causal: whether sliding layers are causal inside the block.
    convolution: {"taps": ..., "group_size": ..., "dynamic_from": ...}: short convolutions along the block around each
        sublayer (`convolutions.BlockConvolution`), {} for DFlash 2's, None for none.
    slot_embed: whether each slot behind the anchor bears an embedding of its place (`slots.SlotEmbedding`).
    carryover: let a draft read the target's states of the tokens that were rejected last (Carryover, 2609.14717).
        Chains only: no tree's rejected nodes are read.
    max_stages: blocks that may be drafted before one verification (DLoop, 2610.07659). Trees have one.
    stage_threshold: go on while the newest block's tokens have together a log-probability above it.
    stage_adapter: whether own states pass a linear layer (which starts as the identity) before later stages read them.
    edit_passes: passes that read the drafted block again and may change it (DEdit, 2609.38510); 0 for none.
    edit_early_exit: end them where no row of the pass changed. The same drafts, for one wait for the device per pass.
    edit_type_embedding: whether drafted tokens bear a mark of their own (`editing.EditEmbedding`).
    edit_sampling: when the request samples, "law": draw from the last pass's marginals; "argmax": a point draft.
    edit_gate: "cavity", or {"name": "cavity", and options of `editing.CavityGate`}: keep the round's draft of lowest
        energy (DRLM), a point draft; None: the last pass's. Needs two edit passes, one to judge what the other made.
    corrector: {"name": ..., and its options}: makes the slots' tokens fit each other (`correctors`), None for none.
    confidence: options of a head that estimates each slot's chance of being accepted (`confidence.ConfidenceHead`),
        {} for none of them; None for no head.
    predraft: options of a part that tells what a draft is worth before it is made (`predraft.PreDraft`), {} for none of
        them; None for no such part.
    length_head: options of a head that estimates how much of a block is worth verifying (`length_head.LengthHead`, for
        the policy "adaflash"), {} for none of them; None for no head.
    draft_sampling: when the request samples, draw the draft from the warped marginals (and verify by its exact law)
        instead of taking the argmax.
    """

    model_type = "specdraft_block"
    ignore_keys_at_rope_validation = {"partial_rotary_factor"}

    # Qwen3-4B's published drafter.
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 40960
    rope_parameters: dict | None = None
    initializer_range: float = 0.02

    block_size: int = 16
    short_blocks: list[int] | None = None
    anchor_drafts: bool = False
    mask_token_id: int = 0
    target_layer_ids: list[int] | tuple[int, ...] = (1, 9, 17, 25, 33)
    reads_final: bool = False
    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    own_embeddings: bool = False
    skip_embed_norm: bool = False
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    sliding_rule: str = "distance"
    sliding_causal: bool = False

    convolution: dict | None = None
    slot_embed: bool = False
    carryover: bool = False
    max_stages: int = 1
    stage_threshold: float = -0.5
    stage_adapter: bool = False
    edit_passes: int = 0
    edit_early_exit: bool = True
    edit_type_embedding: bool = False
    edit_sampling: str = "law"
    edit_gate: str | dict | None = None
    corrector: dict | None = None
    confidence: dict | None = None
    length_head: dict | None = None
    predraft: dict | None = None

    # None: as many as the stages give.
    num_assistant_tokens: int | None = None
    draft_sampling: bool = True

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        self.target_layer_ids = list(self.target_layer_ids)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        _require(self.num_drafts >= 1, f"block_size {self.block_size} leaves no slot to draft")
        _require(self.max_stages >= 1, f"max_stages must be at least 1, got {self.max_stages}")
        self.short_blocks = sorted(self.short_blocks) if self.short_blocks else None
        shortest = self.first_slot + 1
        _require(
            all(shortest <= size < self.block_size for size in self.short_blocks or ()),
            f"short_blocks must lie between {shortest} and block_size {self.block_size}, got {self.short_blocks}",
        )
        whole = [
            name
            for name in ("edit_passes", "carryover", "slot_embed", "length_head", "convolution")
            if getattr(self, name) not in (None, False, 0)
        ]
        whole += ["max_stages"] if self.max_stages > 1 else []
        _require(
            not (self.short_blocks and whole),
            f"short_blocks cannot be had with {', '.join(whole)}, which work on whole blocks",
        )
        most = self.max_stages * self.num_drafts
        if self.num_assistant_tokens is None:
            self.num_assistant_tokens = most
        super().__post_init__(**kwargs)
        _require(
            self.num_assistant_tokens <= most,
            f"num_assistant_tokens {self.num_assistant_tokens} is more than the {most} of max_stages {self.max_stages}",
        )
        _require(self.edit_passes >= 0, f"edit_passes must be 0 or more, got {self.edit_passes}")
        _require(
            self.edit_sampling in ("law", "argmax"), f"edit_sampling must be law or argmax, got {self.edit_sampling!r}"
        )
        _require(
            self.gate is None or self.edit_passes >= 2,
            "edit_gate needs edit_passes of 2 or more: a draft's energy is known to the pass after it",
        )
        _require(
            bool(self.target_layer_ids) or self.reads_final,
            "target_layer_ids is empty: the drafter would read nothing of the target",
        )
        _require(
            not self.reads_final or self.num_target_layers is not None,
            "reads_final needs num_target_layers, to know which state is the target's last",
        )
        _require(
            len(self.layer_types) == self.num_hidden_layers
            and set(self.layer_types) <= {"full_attention", "sliding_attention"},
            f"layer_types {self.layer_types} must name full_attention or sliding_attention for each of the "
            f"{self.num_hidden_layers} layers",
        )
        _require(
            "sliding_attention" not in self.layer_types or bool(self.sliding_window),
            "layer_types has sliding layers but sliding_window is not set",
        )
        _require(
            self.sliding_rule in SLIDING_RULES,
            f"sliding_rule must be one of {', '.join(SLIDING_RULES)}, got {self.sliding_rule!r}",
        )
        _require(self.vocab_size is not None or not self.own_embeddings, "own embeddings need vocab_size")
        _require(
            not self.own_embeddings or 0 <= self.mask_token_id < self.vocab_size,
            f"mask_token_id {self.mask_token_id} is outside the drafter's vocabulary of {self.vocab_size}",
        )
        _require(
            self.rope_parameters["rope_type"] in ROPE_TYPES,
            f"rope_type {self.rope_parameters['rope_type']!r} is not supported ({', '.join(ROPE_TYPES)} are): its "
            "angles depend on the length, and the context's keys are cached",
        )

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers read, in the order of `fc`'s columns."""
        return (*self.target_layer_ids, *([self.num_target_layers - 1] if self.reads_final else []))

    @property
    def num_drafts(self) -> int:
        """Tokens one block drafts."""
        return self.block_size - (not self.anchor_drafts)

    @property
    def first_slot(self) -> int:
        """The slot that predicts the token after the anchor."""
        return int(not self.anchor_drafts)

    @property
    def unroll_mode(self) -> str:
        """The mode of the unroll (`unroll_block`) that drafts as decoding does with these fields."""
        if self.edit_passes:
            return "edit"
        if self.short_blocks:
            return "short"
        return "carryover" if self.carryover else "loop" if self.max_stages > 1 else "plain"

    @property
    def gate(self) -> CavityGate | None:
        """The gate between edit passes."""
        return None if self.edit_gate is None else CavityGate.of(self.edit_gate, self.num_drafts)

    @property
    def draws_marginals(self) -> bool:
        """Whether a draft of the slots' own marginals is drawn from them when the request samples."""
        edits_drawn = not self.edit_passes or (self.edit_sampling == "law" and self.edit_gate is None)
        return self.draft_sampling and edits_drawn

    @property
    def window_acts(self) -> bool:
        """Whether sliding layers see less than full ones."""
        return self.sliding_causal or self.sliding_rule != "unbounded"

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, tokenizer: Any = None, **overrides) -> BlockConfig:
        """A new drafter for a target: its widths, heads and rotary angles (those of full attention, without a scaling
        that depends on the length), as many layers and as many of its states as DFlash has.

        tokenizer: the target's, which `mask_token_for` chooses mask_token_id from when that is not given.
        overrides: fields that are to be different.
        """
        text = target_config.get_text_config()
        layers = overrides.get("num_hidden_layers", cls.num_hidden_layers)
        values = dict(
            **network_like(text, cls),
            target_layer_ids=tapped_layers(text.num_hidden_layers, layers),
            num_target_layers=text.num_hidden_layers,
            target_hidden_size=text.hidden_size,
            target_name=target_config.name_or_path or None,
        )
        if "mask_token_id" not in overrides:
            values["mask_token_id"] = mask_token_for(tokenizer, text.vocab_size)
        return cls(**{**values, **overrides})

    @classmethod
    def tiny(cls, **overrides) -> BlockConfig:
        """Own embeddings, a reduced head, one sliding and one full layer, for a target of two layers or more, hidden
        size 32 and 64 tokens."""
        values = dict(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            block_size=4,
            mask_token_id=63,
            target_layer_ids=[-1, 0],
            own_embeddings=True,
            own_head=True,
            draft_vocab_size=48,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=8,
        )
        return cls(**{**values, **overrides})


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
