"""The target's side of a call: prefill, one scoring pass per round, its cache, and whether it accepts trees."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from . import features as feature_rows
from .cache import RowCache, can_realign, make_room, record_past, refuse_uncuttable
from .draft import Draft, Features
from .trees import visibility

# Tensors in model_kwargs that stand beside the tokens and grow with them: what a new token's entry is.
_TOKEN_TYPES = {"token_type_ids": "last", "mm_token_type_ids": "zero", "moe_mm_token_type_ids": "zero"}
_PREFILL_ONLY = ("position_ids", "attention_mask", "cache", "inputs_embeds", "logits_to_keep", *_TOKEN_TYPES)


class TargetPass:
    """One call's view of the target model.

    layers: the layers the drafter reads (zero-based, -1 the embedding), recorded in every pass.
    """

    def __init__(self, model: PreTrainedModel, config: GenerationConfig, model_kwargs: dict, layers: tuple[int, ...]):
        self.model, self.config, self.kwargs, self.layers = model, config, model_kwargs, layers
        self.all_hidden = bool(config.output_hidden_states)
        self.user_hidden = config.output_hidden_states
        if layers or self.all_hidden:
            # A list makes transformers record only these; the caller's own request needs them all.
            self.kwargs["output_hidden_states"] = True if self.all_hidden else [layer + 1 for layer in layers]
        self.forward = (
            model.get_compiled_call(config.compile_config)
            if model._valid_auto_compile_criteria(model_kwargs, config)
            else model.__call__
        )

    def prefill(self, input_ids: Tensor, width: int, trees: bool) -> Any:
        """The prompt through the target exactly as plain generate does it; returns the model's output.

        width: columns of the widest pass that will usually follow. trees: whether tree drafts are wanted, without which
        the target is not probed for them.
        """
        _refuse_unready(self.model, self.config, self.kwargs, input_ids)
        cache = self.kwargs.get("cache")
        refuse_uncuttable(cache)
        if len(input_ids) > 1:
            make_room(cache, self.config.max_length - 1 + _unnamed(input_ids, self.kwargs), width)
        if self.layers and self.config.prefill_chunk_size is not None:
            chunked = _Chunked(self.model)
            outputs = type(self.model)._prefill(chunked, input_ids, self.config, self.kwargs)
            self.prompt_states = chunked.states
        else:
            outputs = self.model._prefill(input_ids, self.config, self.kwargs)
            self.prompt_states = [outputs.get("hidden_states")]
        self.kwargs = dict(self.kwargs)
        refuse_uncuttable(outputs.get("cache"))
        self.cache = outputs.cache
        record_past(self.cache, True)
        batch = input_ids.shape[0]
        self.rows = RowCache(self.cache, batch, self.kwargs.get("attention_mask"))
        if batch > 1 and not can_realign(self.cache):
            raise ValueError(
                f"rows of a {type(self.cache).__name__} with these layers cannot be re-aligned after uneven acceptance;"
                " generate one row at a time or use the default dynamic cache"
            )
        able = trees and can_realign(self.cache)
        form = tree_form(self.model, run_device(self.model, input_ids)) if able else None
        self._tree_mask = None if form is None else _TreeMask(self.model, form)
        positions = self.kwargs.get("position_ids")
        # [.., B, 1] position of the first new token; models with three rotary axes have a leading dimension.
        self.first = None if positions is None else positions[..., -1:] + 1
        if self.first is not None and self.first.shape[-2] != batch:
            self.first = self.first.expand(*self.first.shape[:-2], batch, 1)
        self.types = {k: self.kwargs[k][:, -1:] for k in _TOKEN_TYPES if self.kwargs.get(k) is not None}
        self.static = {k: v for k, v in self.kwargs.items() if k not in _PREFILL_ONLY and v is not None}
        self.keeps_logits = "logits_to_keep" in self.kwargs
        self.new = [1] * batch
        return outputs

    @property
    def trees(self) -> bool:
        """Whether the target accepts trees in this call."""
        return self._tree_mask is not None

    @property
    def may_drop_rows(self) -> bool:
        """Whether finished rows can leave: nothing row-shaped remains but what this class keeps itself."""
        return not self.rows.is_static and not any(isinstance(v, Tensor) for v in self.static.values())

    def score(self, anchor: Tensor, draft: Draft) -> Any:
        """ONE target pass over anchor [B] and nodes; logits [B, 1+N, V] in the returned output."""
        batch, nodes = draft.shape
        width = 1 + nodes
        ids = torch.cat([anchor[:, None], draft.tokens.to(anchor.device)], dim=-1)
        depth = None if draft.is_chain else draft.depth
        kwargs = dict(self.static, cache=self.cache, attention_mask=self.rows.mask_for(width))
        if self.first is not None:
            step = torch.arange(width) if depth is None else torch.nn.functional.pad(depth, (1, 0))
            ahead = (step + torch.tensor(self.new)[:, None] - 1).to(self.first.device)
            kwargs["position_ids"] = self.first + ahead
        for name, last in self.types.items():
            kwargs[name] = (last if _TOKEN_TYPES[name] == "last" else torch.zeros_like(last)).expand(-1, width)
        if self.keeps_logits:
            kwargs["logits_to_keep"] = width
        inputs = self.model.prepare_inputs_for_generation(
            ids, next_sequence_length=width, is_first_iteration=False, **kwargs
        )
        if depth is not None:
            inputs["attention_mask"] = self._tree_mask(self.rows, draft, depth, ids.device)
        return self.forward(**inputs, return_dict=True)

    def commit(self, width: int, kept: list[list[int]], tokens: list[int], rows: list[int] | None) -> None:
        """Keep the accepted columns of the last pass; `tokens[b]` new tokens for row b. Rows not in `rows` leave."""
        self.rows.commit(width, kept, rows)
        self.new = [n + t for n, t in zip(self.new, tokens)]
        if rows is not None:
            self.new = [self.new[b] for b in rows]
            if self.first is not None:
                self.first = self.first[..., rows, :]
            self.types = {k: v[rows] for k, v in self.types.items()}

    def prompt_features(self, device: torch.device) -> Features | None:
        states, self.prompt_states = self.prompt_states, []
        if not self.layers:
            return None
        hidden = torch.cat([feature_rows.selected(part, self.layers, device) for part in states], dim=1)
        return feature_rows.of_prompt(hidden, self.rows.columns - hidden.shape[1], self.rows.mask)

    def path_features(self, outputs: Any, kept: list[list[int]], start: list[int], device) -> Features | None:
        if not self.layers:
            return None
        hidden = feature_rows.selected(outputs.hidden_states, self.layers, device)
        return feature_rows.of_path(hidden, kept, start)

    def rejected_features(self, outputs: Any, kept: list[list[int]], nodes: list[int], start: list[int], device):
        """Features of the verified nodes of chains, `nodes[b]` of row b, that are not `kept`."""
        hidden = feature_rows.selected(outputs.hidden_states, self.layers, device)
        return feature_rows.of_rejected(hidden, kept, nodes, start)

    def hand_back(self, start: list[int], columns: int, unfed: list[bool], anchor: Tensor, device) -> Features | None:
        """Leave the cache as plain generate would: `columns` columns, row b from column `start[b]`, the last token of
        rows that ended early (`unfed`) fed as well. Returns those tokens' features."""
        features = None
        if any(unfed):
            kept = [[0] if u else [] for u in unfed]
            outputs = self.score(anchor, Draft.empty(len(unfed), anchor.device))
            features = self.path_features(outputs, kept, self.rows.lengths, device)
            self.rows.commit(1, kept)
        self.rows.lay_out(start, columns)
        self.release()
        return features

    def release(self) -> None:
        """Stop recording what a rejected draft would need back."""
        if hasattr(self, "cache"):
            record_past(self.cache, False)


class _Chunked:
    """The model as `_prefill` sees it, keeping the hidden states of every chunk: it returns the last chunk's only.

    In place of a hook on the model, which other threads may be running.
    """

    def __init__(self, model: PreTrainedModel):
        self._model, self.states = model, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs) -> Any:
        return self._kept(self._model(**inputs))

    def get_compiled_call(self, config) -> Callable:
        call = self._model.get_compiled_call(config)
        return lambda **inputs: self._kept(call(**inputs))

    def _kept(self, outputs: Any) -> Any:
        self.states.append(outputs.hidden_states)
        return outputs


def run_device(model: PreTrainedModel, ids: Tensor) -> torch.device:
    """Where the target takes its inputs: its own device, or that of the tokens while offloading hooks hold back every
    weight and leave placeholders."""
    return ids.device if model.device.type == "meta" else model.device


def _refuse_unready(model: PreTrainedModel, config: GenerationConfig, kwargs: dict, input_ids: Tensor) -> None:
    """Raise ValueError for prompts and settings that cannot be served, before any work."""
    mask, embeds = kwargs.get("attention_mask"), kwargs.get("inputs_embeds")
    if input_ids.shape[1] == 0 and embeds is None:
        raise ValueError("the prompt is empty; pass at least one token (a BOS token will do)")
    if mask is not None and not bool(mask.any(-1).all()):
        empty = (~mask.bool().any(-1)).nonzero().flatten().tolist()
        raise ValueError(f"rows {empty} of attention_mask are all padding; drop them or give them one token")
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    limit = getattr(text, "original_max_position_embeddings", None) or rope.get("original_max_position_embeddings")
    unnamed = _unnamed(input_ids, kwargs)
    longest = (config.max_length or 0) + unnamed
    if rope.get("rope_type") == "longrope" and limit and input_ids.shape[1] + unnamed <= limit < longest:
        raise ValueError(
            f"the target changes its rotary factors at {limit} tokens and recomputes its cache there; keep max_length "
            f"(now {longest}) at or below {limit}, or generate without assistant_model"
        )


def _unnamed(input_ids: Tensor, kwargs: dict) -> int:
    """Columns of a prompt given as embeddings that have no ids; `max_length` does not count them."""
    embeds = kwargs.get("inputs_embeds")
    return 0 if embeds is None else embeds.shape[1] - input_ids.shape[1]


# ---- trees -------------------------------------------------------------------------------------------------------

_FORMS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _attention(model: PreTrainedModel) -> str:
    return model.config.get_text_config()._attn_implementation


def mask_dtype(model: PreTrainedModel) -> torch.dtype:
    """Eager attention adds its mask, so there it is a float mask; boolean for SDPA."""
    return model.dtype if _attention(model) == "eager" else torch.bool


def as_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """What is visible, as a mask of this dtype."""
    if dtype == torch.bool:
        return visible
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill(~visible, torch.finfo(dtype).min)


def windows(model: PreTrainedModel) -> dict[str, int | None] | None:
    """Sliding window by layer type ("" when the config names no types), None for layer types a tree cannot serve."""
    text = model.config.get_text_config()
    others = ("window_size", "attention_chunk_size", "attention_layers", "local_attention")
    if any(getattr(text, name, None) is not None for name in others):
        return None  # a window of another kind, which the model builds itself and a short probe would not meet
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types is None:
        return {"": window}
    known = {"full_attention": None, "sliding_attention": window}
    return {t: known[t] for t in dict.fromkeys(types)} if set(types) <= set(known) else None


def tree_form(model: PreTrainedModel, device: torch.device | None = None) -> str | None:
    """How the target takes a tree mask: "dict" by layer type, "tensor", or None when it does not (then chains).

    Found once per model and attention implementation by comparing a small tree pass with causal passes: ALiBi models,
    flash attention and models that build their own mask fail it.
    """
    forms = _FORMS.setdefault(model, {})
    key = _attention(model)
    if key not in forms:
        forms[key] = next((form for form in ("dict", "tensor") if _probe(model, form, device or model.device)), None)
    return forms[key]


def _probe(model: PreTrainedModel, form: str, device: torch.device) -> bool:
    kinds = windows(model)
    if kinds is None or _attention(model) not in ("eager", "sdpa", "specdraft_tree"):
        return False
    if form == "dict" and "" in kinds or form == "tensor" and len(set(kinds.values())) > 1:
        return False
    vocab = model.config.get_text_config().vocab_size
    ids = (torch.arange(18).view(2, 9) * 7 + 3) % vocab
    prompt, nodes = ids[:, :4].to(device), ids[:, 5:].to(device)
    mask = torch.ones_like(prompt)
    mask[1, 0] = 0  # one left-padded row
    parents = torch.tensor([[-1, -1, 0, 1]] * 2)
    draft = Draft(nodes, parents, torch.ones(2, 4, dtype=torch.bool))
    try:
        with torch.no_grad():
            cache = DynamicCache(config=model.config.get_text_config())
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            model(input_ids=prompt, attention_mask=mask, position_ids=positions, cache=cache, use_cache=True)
            rows = RowCache(cache, 2, mask)
            depth = draft.depth
            anchor = ids[:, 4:5].to(device)
            at = positions[:, -1:] + 1 + torch.nn.functional.pad(depth, (1, 0)).to(device)
            tree = model(
                input_ids=torch.cat([anchor, nodes], 1),
                attention_mask=_TreeMask(model, form)(rows, draft, depth, device),
                position_ids=at,
                cache=cache,
                use_cache=True,
            ).logits.float()
            for path in ([0, 2], [1, 3]):
                whole = torch.cat([prompt, anchor, nodes[:, path]], 1)
                full_mask = torch.cat([mask, mask.new_ones(2, 3)], 1)
                causal = model(
                    input_ids=whole,
                    attention_mask=full_mask,
                    position_ids=(full_mask.cumsum(-1) - 1).clamp(min=0),
                    use_cache=False,
                ).logits.float()[:, -2:]
                difference = (tree[:, [p + 1 for p in path]] - causal).abs().max()
                tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
                if not difference <= tolerance * causal.std():
                    return False
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError, NotImplementedError):
        # A target that stumbles over the mask in whatever way gets chains.
        return False
    return True


class _TreeMask:
    """Makes what the target's attention layers see in tree passes, for a target that takes it in this `tree_form`."""

    def __init__(self, model: PreTrainedModel, form: str):
        self.form = form
        types = getattr(model.config.get_text_config(), "layer_types", None)
        # By layer type, its window and the number of one of its layers. Configs are slow to read: not in every pass.
        self.kinds = {t: (w, 0 if types is None else types.index(t)) for t, w in windows(model).items()}
        self.dtype = mask_dtype(model)

    def __call__(self, rows: RowCache, draft: Draft, depth: Tensor, device) -> Tensor | dict[str, Tensor]:
        """[B, 1, 1+N, KV] visible columns, by layer type if asked."""
        width = 1 + draft.shape[1]
        seen = visibility(draft.lineage)
        place = torch.nn.functional.pad(depth, (1, 0)) + rows.columns
        masks = {}
        for kind, (window, layer) in self.kinds.items():
            length, offset = _mask_sizes(rows.cache, width, layer)
            # Of the layer's columns, the pass's own stand behind its context.
            context = rows.columns - offset
            inside = slice(context, context + width)
            visible = torch.zeros(rows.batch, width, length, dtype=torch.bool)
            visible[:, :, :context] = True
            visible[:, :, inside] = seen
            if window is not None:
                at = (torch.arange(length) + offset).repeat(rows.batch, 1)
                at[:, inside] = place
                visible &= place[:, :, None] - at[:, None, :] < window
            visible = visible.to(device)
            if rows.mask is not None:
                beyond = (0, max(0, offset + length - rows.columns))
                padded = torch.nn.functional.pad(rows.mask.bool(), beyond, value=True)
                visible &= padded[:, None, offset : offset + length].to(device)
            masks[kind] = as_mask(visible[:, None], self.dtype)
        return masks if self.form == "dict" else next(iter(masks.values()))


def _mask_sizes(cache: Cache, width: int, layer: int) -> tuple[int, int]:
    length, offset = cache.get_mask_sizes(width, layer)
    return int(length), int(offset)
