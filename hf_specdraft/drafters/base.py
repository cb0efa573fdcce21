"""The contract of a drafter: a config, a model that holds weights only, a session that holds a call's state."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from .. import policies
from ..draft import Commit, Context, Draft
from ..parts import Scored

if TYPE_CHECKING:
    from transformers import PreTrainedModel as Target

    from ..training.records import TrainingBatch, Unrolled


def base_module(module: nn.Module) -> nn.Module:
    """The module beneath PEFT's wrappers, so that an adapter of the target never acts on a drafter that borrows it."""
    while True:
        inner = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
        if inner is None:
            return module
        module = inner


def end_ids(model: Target) -> tuple[int, ...]:
    """The tokens that the target ends a text with, as its own generation config has them."""
    ends = model.generation_config.eos_token_id if model.can_generate() else model.config.eos_token_id
    return tuple(ends) if isinstance(ends, (list, tuple)) else () if ends is None else (ends,)


class TargetView:
    """What a drafter may know of the target: numbers, its embedding and its head. Never its class.

    `embed` and `head` call the modules (a packed 4-bit layer has no float weight to read) and bypass LoRA layers.
    """

    def __init__(self, model: Target):
        self.config = model.config.get_text_config()
        self.vocab_size: int = self.config.vocab_size
        self.hidden_size: int = getattr(self.config, "hidden_size", 0)
        self.num_layers: int = getattr(self.config, "num_hidden_layers", 0)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.end_ids = end_ids(model)
        self._embedding = model.get_input_embeddings()
        self._head = model.get_output_embeddings()

    def embed(self, ids: Tensor, skip_norm: bool = False) -> Tensor:
        """[..., ] token ids -> [..., H] embeddings, as the target's own embedding module gives them.

        skip_norm: leave out the module's `embed_norm`, where it has one (Muse targets): the bare table lookup.
        """
        module = base_module(self._embedding)
        if skip_norm and hasattr(module, "embed_norm"):
            return torch.nn.Embedding.forward(module, ids.to(module.weight.device))
        return module(ids.to(_device_of(module, ids.device)))

    def head(self, hidden: Tensor) -> Tensor:
        """[..., H] hidden states -> [..., V] logits by the target's output embedding (no soft-cap, no scaling)."""
        module = base_module(self._head)
        return module(hidden.to(_device_of(module, hidden.device)))


def _device_of(module: nn.Module, default: torch.device) -> torch.device:
    tensor = next(module.parameters(), None)
    return default if tensor is None or tensor.device.type == "meta" else tensor.device


class TargetTokens:
    """Stands for the tokenizer of a drafter, which speaks the target's own tokens: what AutoTokenizer makes of a folder
    of ours that holds no tokenizer files, because transformers' pipelines load one with every assistant folder."""

    @classmethod
    def from_pretrained(cls, name_or_path, *args, **kwargs) -> TargetTokens:
        return cls()


# What transformers itself may pass to a config beside the fields, and handles (a training script's `use_cache` too).
_UPSTREAM_KEYS = {
    *GenerationConfig._get_default_generation_params(),
    "model_type",
    "torch_dtype",
    "name_or_path",
    "attn_implementation",
    "experts_implementation",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "auto_map",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
}


# The module in a saved folder that makes transformers know the family.
CODE = "modeling_specdraft"


class DrafterConfig(PreTrainedConfig):
    """Fields every family has. An unknown one is a ValueError: a setting that acts on nothing hides a mistake.

    vocab_size: the TARGET's vocabulary; a reduced draft vocabulary has its own field.
    num_assistant_tokens: how deep a draft goes when the caller does not say.
    tree_nodes: nodes verified per round when the target accepts trees; 0 drafts chains.
    policy: "auto" switches drafting off while it does not pay, "fixed" always drafts; or one of `policies` by name, or
        {"name": ..., and its options}.
    target_name: the target the drafter was made for, for messages and its card; target_revision: its commit.
    chat_template_sha256: checksum of the chat template it was trained on (`publishing.template_sha256`), None when not
        known, "" when it was trained on text without one; chat_template_kwargs: what the template was rendered with,
        such as {"enable_thinking": False}. Another template or mode costs acceptance; the commands warn of it.
    verification: how chains drawn from the drafter's law are verified: "block" (Sun et al. 2403.10444, accepts more) or
        "token" (Leviathan et al. 2211.17192). Both are exact.
    lossy_typical_acceptance: Medusa's typical acceptance when sampling. LOSSY: the output loses the target's law.
    bos_token_id, eos_token_id, pad_token_id: the target's, or None. Drafting ignores them; a pipeline given a drafter
        object without assistant_tokenizer wants them, and vocab_size, equal to the target's.
    """

    vocab_size: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    num_assistant_tokens: int = 8
    tree_nodes: int = 0
    policy: str | dict = "auto"
    target_name: str | None = None
    target_revision: str | None = None
    chat_template_sha256: str | None = None
    chat_template_kwargs: dict | None = None
    verification: str = "block"
    lossy_typical_acceptance: bool = False

    def __post_init__(self, **kwargs):
        unknown = {key for key in kwargs if not key.startswith("_")} - _UPSTREAM_KEYS
        if unknown:
            raise ValueError(
                f"{type(self).__name__} has no field {', '.join(sorted(unknown))}; correct the name, or use a version "
                "of hf_specdraft that knows it"
            )
        super().__post_init__(**kwargs)
        if self.num_assistant_tokens < 1:
            raise ValueError(f"num_assistant_tokens must be at least 1, got {self.num_assistant_tokens}")
        if self.tree_nodes < 0:
            raise ValueError(f"tree_nodes must not be negative, got {self.tree_nodes}; 0 drafts chains")
        policies.check(self.policy)
        if self.verification not in ("block", "token"):
            raise ValueError(f"verification must be 'block' or 'token', got {self.verification!r}")

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> DrafterConfig:
        """As PreTrainedConfig.from_dict, but fields among `kwargs`, which are options of from_pretrained, are checked
        like all others: upstream sets them on the finished config. Parts' configs are left to it, which merges them."""
        own = set(cls.__dataclass_fields__) - set(PreTrainedConfig.__dataclass_fields__)
        fields = {name: kwargs.pop(name) for name in list(kwargs) if name in own and not name.endswith("_config")}
        return super().from_dict({**config_dict, **fields}, **kwargs)

    def to_dict(self) -> dict:
        """As PreTrainedConfig.to_dict. A saved folder also names AutoModel among its architectures: pipelines look for
        the class of an assistant in transformers itself, and AutoModel is the one there that knows ours. And it names
        the code that `trust_remote_code` runs (`publishing.hub` writes it)."""
        output = super().to_dict()
        if output.get("architectures"):
            model = next(a for a in output["architectures"] if a != "AutoModel")
            output["architectures"] = [model, "AutoModel"]
            output["auto_map"] = {"AutoConfig": f"{CODE}.{type(self).__name__}", "AutoModel": f"{CODE}.{model}"}
        return output

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig") -> None:
        """Nothing: the code in a saved folder imports this package, where upstream would copy its sources."""

    @classmethod
    def tiny(cls, **overrides) -> DrafterConfig:
        """The smallest config that exercises every part of the family, for tests."""
        raise NotImplementedError


class Drafter(PreTrainedModel):
    """A drafter. Subclasses hold weights only; everything a call changes lives in the session they start."""

    config: DrafterConfig
    base_model_prefix = ""
    # Layers whose output the session wants as features, as zero-based layer ids; -1 is the embedding output.
    feature_layers: tuple[int, ...] = ()
    # Whether its sessions want the features of rejected nodes, too (`Commit.rejected`).
    wants_rejected: bool = False
    # Whether a draft costs next to nothing (no network), so that asking in vain is no loss.
    is_free: bool = False
    # Whether it can also draft without its network (`Context.free_only`, `Draft.free`).
    has_free_part: bool = False
    # The published dialects that `to_dialect` writes.
    export_dialects: tuple[str, ...] = ()
    # Whether a draft's cost grows with its depth (one pass per level).
    is_sequential: bool = False

    @property
    def device(self) -> torch.device:
        """Where the weights are; the CPU for a family without any."""
        tensor = next(self.parameters(), None)
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def dtype(self) -> torch.dtype:
        tensor = next(self.parameters(), None)
        return torch.float32 if tensor is None else tensor.dtype

    @property
    def generation_config(self) -> GenerationConfig:
        """A new one each time: a drafter has none of these settings, but Whisper targets write to their assistant's."""
        return GenerationConfig()

    def check(self, view: TargetView) -> None:
        """Raise ValueError, with cause and remedy, when this drafter cannot serve the target."""
        vocab = self.config.vocab_size
        # One tokenizer's heads are padded to different sizes: Qwen's have 151936 or 152064 rows.
        if vocab is not None and abs(vocab - view.vocab_size) > max(64, max(vocab, view.vocab_size) // 50):
            raise ValueError(
                f"drafter was built for a vocabulary of {vocab} but the target has {view.vocab_size}; load the target "
                f"named in drafter.config.target_name ({self.config.target_name}), or give generate tokenizer= and "
                "assistant_tokenizer= if this is an assistant with a tokenizer of its own"
            )
        for layer in self.feature_layers:
            if not -1 <= layer < view.num_layers:
                raise ValueError(
                    f"drafter reads the target's layer {layer}, but the target has layers 0 to {view.num_layers - 1}; "
                    f"load the target named in drafter.config.target_name ({self.config.target_name})"
                )

    @classmethod
    def from_pretrained(cls, name_or_path, *args, **kwargs) -> Drafter:
        """As PreTrainedModel.from_pretrained, safetensors only, but what it would warn of is a ValueError.

        Raises ValueError naming the tensors that are missing, left over, of a wrong shape, or not finite.
        """
        with_info = kwargs.pop("output_loading_info", False)
        # "Ignored" here means reported: upstream's own error for a wrong shape does not name the tensor.
        kwargs = {"use_safetensors": True, **kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = super().from_pretrained(name_or_path, *args, **kwargs)
        problems = [
            f"{kind.removesuffix('_keys')}: {', '.join(sorted(map(str, info[kind])))}"
            for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
            if info[kind]
        ]
        problems += [
            f"not finite: {name}"
            for name, tensor in model.state_dict().items()
            if tensor.is_floating_point()
            and not tensor.is_meta
            # PyTorch cannot ask this of every 8-bit type.
            and not (tensor.bfloat16() if tensor.itemsize == 1 else tensor).isfinite().all()
        ]
        if problems:
            raise ValueError(
                f"the checkpoint's tensors do not make the drafter its config describes ({'; '.join(problems)}); "
                "a drafter loaded in part would draft noise, so get a complete copy of it"
            )
        return (model, info) if with_info else model

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel") -> None:
        """Nothing, as for DrafterConfig."""

    def save_pretrained(
        self, save_directory, is_main_process: bool = True, push_to_hub: bool = False, **kwargs
    ) -> None:
        """As PreTrainedModel.save_pretrained, with a card and what lets AutoModel load the folder by trust_remote_code.

        README.md is written when there is none, or one that this package wrote.
        """
        from ..publishing import hub

        remote = {key: kwargs.pop(key) for key in hub.PUSH_KEYS if key in kwargs}
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process and not getattr(self, "_hf_peft_config_loaded", False):
            hub.complete(save_directory, self)
            if push_to_hub:
                hub.push(save_directory, **{"repo_id": Path(save_directory).name, **remote})

    def push_to_hub(self, repo_id: str, *, max_shard_size: int | str = "50GB", **remote: Any) -> str:
        """Save the drafter and upload it; `remote` as for `publishing.push`. Returns the commit's URL."""
        from ..publishing import hub

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            return hub.push(folder, repo_id, **remote)

    def to_dialect(self, dialect: str, target: Target | None = None) -> tuple[Drafter, dict, dict[str, Tensor]]:
        """This drafter in one of `export_dialects`: what is written, as a drafter, then its config.json and tensors.

        The first differs from self where the dialect stores what self borrows from the target, and is only read.
        Raises ValueError for what the dialect cannot express.
        """
        raise NotImplementedError

    @classmethod
    def dialect_of(cls, config: dict) -> str | None:
        """The name of the published dialect that `config` (a config.json as a dict) is written in, None if not ours."""
        return None

    @classmethod
    def from_dialect(cls, name_or_path, config: dict, **kwargs) -> Drafter:
        """Load a checkpoint whose `dialect_of` is not None. Raises ValueError when anything in it is left unread."""
        raise NotImplementedError

    def between(self, tokenizer, assistant_tokenizer) -> Drafter:
        """This drafter, speaking the target's tokens although its own are different (the two tokenizers were given to
        generate). Most families draft target tokens and have nothing to do."""
        return self

    def start(self, view: TargetView, batch: int) -> Session:
        """A session for `batch` rows. Its first `observe` brings the prompt."""
        raise NotImplementedError

    def forward(self, *args, training: Callable[[Drafter], Any] | None = None, **kwargs) -> Any:
        """One drafting pass (`draft_pass`), or what `training` makes of this drafter.

        DDP, FSDP, DeepSpeed and PEFT act on forward alone, so a training step, loss included, must happen inside it.
        """
        return self.draft_pass(*args, **kwargs) if training is None else training(self)

    def draft_pass(self, *args, **kwargs) -> Any:
        """One pass of the network, tensors in, tensors out."""
        raise NotImplementedError(f"{type(self).__name__} has no network")

    def grown(self, **fields) -> Drafter:
        """A drafter with these config fields changed: what both have is copied, new parts start as they do.

        Raises ValueError when a weight of this one has no place in it, or one of another shape.
        """
        config = copy.deepcopy(self.config)
        values = {**{k: v for k, v in config.to_dict().items() if k in type(config).__dataclass_fields__}, **fields}
        grown = type(self)(type(config)(**values)).to(self.device, self.dtype)
        state, room = self.state_dict(), grown.state_dict()
        lost = [name for name, tensor in state.items() if name not in room or room[name].shape != tensor.shape]
        if lost:
            raise ValueError(
                f"{', '.join(f'{key}={value!r}' for key, value in fields.items())} leaves no room for the trained "
                f"weights {', '.join(sorted(lost)[:5])}; only parts may be added to a trained drafter"
            )
        grown.load_state_dict(state, strict=False)
        return grown.train(self.training)

    def start_from(self, view: TargetView, batches: Iterable[TrainingBatch]) -> None:
        """Set what a few batches, with features and last_hidden, determine in closed form, before any training step."""
        raise ValueError(f"{type(self).__name__} has no start in closed form; leave start_texts out")

    def unroll(self, view: TargetView, batch: TrainingBatch, **options) -> Unrolled:
        """What this drafter would draft along the texts of a batch. options: the family's own, from the recipe."""
        raise ValueError(f"{type(self).__name__} has nothing to train")

    @classmethod
    def check_unroll(cls, options: dict) -> None:
        """Raise ValueError for values of unroll's options that it would refuse, before any work."""

    def logits(self, view: TargetView, hidden: Tensor) -> Tensor:
        """[..., H] of `Unrolled.hidden` -> [..., K] logits, K the drafter's vocabulary (see `draft_token_ids`)."""
        raise ValueError(f"{type(self).__name__} has nothing to train")

    def score(self, view: TargetView, unrolled: Unrolled) -> Scored:
        """What the slots of some anchors say: `logits`, and what the drafter's parts make of them."""
        return Scored(self.logits(view, unrolled.hidden))

    @property
    def draft_token_ids(self) -> Tensor | None:
        """[K] ascending target ids of a reduced draft vocabulary, None when the drafter speaks the target's whole."""
        return None


class Session:
    """The state of one call. Rows are those of the loop, in its order."""

    def propose(self, context: Context) -> Draft:
        """A draft for each row with `context.lengths[b] > 0` (others: no valid node).

        May return fewer nodes than allowed, down to `Draft.empty`. Must not change what later calls propose beyond
        caching: the loop may drop a draft unverified, or not ask for many rounds.
        """
        raise NotImplementedError

    def outlook(self) -> Tensor | None:
        """[B, G] chances that the first 1, 2, ... tokens of the draft to be made now are all accepted, as far as a part
        of the drafter can tell before drafting; None without such a part."""
        return None

    def observe(self, commit: Commit) -> None:
        """Hear what was committed. Called after every target pass, whether or not a draft was made."""
        raise NotImplementedError

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on, in this order (finished rows leave the pass)."""
        raise NotImplementedError
