"""What the target makes of a training batch: hidden states for the drafter to read, and the law to learn from.

Shapes: B rows, L columns, n recorded layers, Ht the target's width, V its vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel

from ..drafters.base import TargetView
from ..features import selected
from ..target import run_device
from .records import TrainingBatch


class LiveFeatures:
    """Fills a batch's `features` and `last_hidden` by running the frozen target on it; nothing is stored.

    Packed documents run apart, as rows of an ordinary right-padded batch: every architecture takes that, whatever its
    window, position code or recurrence. Columns of no document are zeros.

    target: in its own dtype, without autocast; put into eval mode (training noise has no place in a law). An active
        PEFT adapter counts as part of it. No gradient reaches it.
    layers: zero-based, -1 the embedding output. The last layer is read as decoding reads it: after the final norm.
    law: whether to fill `last_hidden`.
    dtype: of the results, the target's by default.

    Raises ValueError for a layer the target lacks, and in a call when a result is not finite, naming layer and dtype.
    """

    def __init__(
        self, target: PreTrainedModel, layers: tuple[int, ...], law: bool = True, dtype: torch.dtype | None = None
    ):
        self.target = plain_model(target).eval()
        self.layers, self.law, self.dtype = tuple(layers), law, dtype or self.target.dtype
        count = TargetView(self.target).num_layers
        for layer in self.layers:
            if not -1 <= layer < count:
                raise ValueError(
                    f"there is no layer {layer} in the target: {type(self.target).__name__} has layers 0 to "
                    f"{count - 1}, and -1 for the embedding output"
                )

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch, index: Tensor | None = None) -> TrainingBatch:
        """The batch with `features` [B, L, n*Ht] (None without layers) and `last_hidden` [B, L, Ht] (None without law),
        on its device. index: not needed here."""
        if not self.layers and not self.law:
            return batch
        self.target.eval()
        live = batch.document_ids > 0
        documents = _documents(batch, live)
        done: list[list[Tensor]] = [[]] * len(documents)
        for group in _groups([len(tokens) for tokens in documents]):
            states = self._run([documents[i] for i in group])
            for row, i in enumerate(group):
                done[i] = [state[row, : len(documents[i])] for state in states]
        parts = [spread(torch.cat(pieces), live) for pieces in zip(*done)]
        last_hidden = parts.pop() if self.law else None
        features = parts.pop() if self.layers else None
        self._refuse_broken(features, last_hidden)
        return replace(batch, features=features, last_hidden=last_hidden)

    def _run(self, documents: list[Tensor]) -> list[Tensor]:
        """[features, last_hidden], as far as asked for, each [N, W, ...] of N documents padded to W columns."""
        device = documents[0].device
        ids = pad_sequence(documents, batch_first=True)
        mask = pad_sequence([torch.ones_like(tokens) for tokens in documents], batch_first=True)
        out = backbone_pass(self.target, ids, mask, self.layers)
        states = [selected(out.hidden_states, self.layers, device)] if self.layers else []
        if self.law:
            states.append(out.last_hidden_state.to(device))
        return [state.to(self.dtype) for state in states]

    def _refuse_broken(self, features: Tensor | None, last_hidden: Tensor | None) -> None:
        broken = []
        if features is not None and not features.isfinite().all():
            by_layer = features.unflatten(-1, (len(self.layers), -1)).isfinite().all(-1).flatten(0, 1).all(0)
            broken += [f"layer {layer}" for layer, good in zip(self.layers, by_layer.tolist()) if not good]
        if last_hidden is not None and not last_hidden.isfinite().all():
            broken.append("the last hidden state")
        if broken:
            raise ValueError(
                f"{' and '.join(broken)} of {type(self.target).__name__} has values that are not finite in "
                f"{self.dtype} (the target runs in {self.target.dtype}); use bfloat16 or float32 for both, or drop "
                "the layer"
            )


class TargetLaw:
    """Logits as the target's own forward makes them of what its head reads: head, scaling (Granite, Cohere), soft-cap
    (Gemma). Which of these apply is found by comparing with the model on a few tokens.

    The target is put into eval mode and must stay as it is: rows of its head are kept between calls. No gradient
    reaches it.

    Raises ValueError when no known form gives the model's own logits.
    """

    def __init__(self, target: PreTrainedModel):
        self.target = plain_model(target).eval()
        self.head = self.target.get_output_embeddings()
        if self.head is None:
            raise ValueError(f"{type(self.target).__name__} has no output embedding, hence no law; load a causal LM")
        self._rows: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._scale, self._cap = self._found()

    @torch.no_grad()
    def __call__(self, hidden: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """[..., Ht] states behind the final norm -> [..., V] logits, or [..., K] of the tokens `token_ids` [K]."""
        with _no_autocast(run_device(self.target, hidden)):
            return self._shaped(self._raw(hidden, token_ids), self._scale, self._cap)

    def shaped(self, raw: Tensor) -> Tensor:
        """The head's own output as the model goes on to scale and cap it; gradient flows."""
        return self._shaped(raw, self._scale, self._cap)

    def _raw(self, hidden: Tensor, token_ids: Tensor | None) -> Tensor:
        weight = getattr(self.head, "weight", None)
        # Exact types: quantised layers and sharded weights are subclasses, and only their module can read them.
        is_plain = type(self.head) is nn.Linear and type(weight) is nn.Parameter and weight.device.type != "meta"
        if not is_plain:
            logits = self.head(hidden.to(run_device(self.target, hidden), self.target.dtype))
            return logits if token_ids is None else logits.index_select(-1, token_ids.to(logits.device))
        hidden = hidden.to(weight.device, weight.dtype)
        if token_ids is None:
            return self.head(hidden)
        return nn.functional.linear(hidden, *self._some_rows(token_ids, weight))

    def _some_rows(self, token_ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        ids = token_ids.to(weight.device)
        kept = self._rows
        if kept is None or not (kept[1].device == ids.device and torch.equal(kept[0], ids)):
            bias = self.head.bias
            self._rows = kept = (ids.clone(), weight[ids], None if bias is None else bias[ids])
        return kept[1:]

    def _found(self) -> tuple[tuple, float | None]:
        """(operation, number) of the scaling and the soft-cap: of all that the config's numbers allow, what comes
        nearest to the model. Models use the same name for dividing (Granite) and multiplying (HyperCLOVA X)."""
        config = self.target.config.get_text_config()
        scales = [(torch.mul, 1.0), *product((torch.mul, torch.div), _numbers(config, _SCALES))]
        caps = [None, *_numbers(config, _CAPS)]
        ids = (torch.arange(8)[None] * 7 + 3) % config.vocab_size
        ids = ids.to(run_device(self.target, ids))
        with torch.no_grad(), _no_autocast(ids.device):
            own = self.target(input_ids=ids, use_cache=False).logits
            hidden = backbone_pass(self.target, ids, torch.ones_like(ids), ()).last_hidden_state
            raw = self._raw(hidden, None)
            errors = {
                (scale, cap): float((self._shaped(raw, scale, cap) - own.to(raw.device)).abs().max())
                for scale, cap in product(scales, caps)
            }
        best = min(errors, key=errors.get)
        tolerance = 1e-4 if raw.dtype in (torch.float32, torch.float64) else 0.03
        if not errors[best] <= tolerance * float(own.abs().max()):
            raise ValueError(
                f"the logits of model type {config.model_type!r} are not its head's, scaled or soft-capped by its "
                f"config's {', '.join(_SCALES + _CAPS)} (off by {errors[best]:.2g}); train with objectives that need "
                "no target law, such as cross-entropy"
            )
        return best

    @staticmethod
    def _shaped(logits: Tensor, scale: tuple, cap: float | None) -> Tensor:
        operation, number = scale
        if number != 1:
            logits = operation(logits, number)
        return logits if cap is None else torch.tanh(logits / cap) * cap


# Under which names configs give the number that logits are multiplied or divided by, and their soft-cap.
_SCALES = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier")
_CAPS = ("final_logit_softcapping", "softcap", "logits_soft_cap")


def _numbers(config: PreTrainedConfig, names: tuple[str, ...]) -> set[float]:
    values = {getattr(config, name, None) for name in names}
    return {value for value in values if isinstance(value, (int, float)) and value}


def plain_model(target: PreTrainedModel) -> PreTrainedModel:
    """The transformers model inside PEFT's wrapper, its adapter's layers included. ValueError for encoder-decoders."""
    model = target.get_base_model() if hasattr(target, "get_base_model") else target
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; drafters are trained for decoder-only targets")
    return model


def backbone_pass(target: PreTrainedModel, ids: Tensor, mask: Tensor, layers: tuple[int, ...]):
    """The model beneath the head on right-padded rows: `hidden_states` of `layers`, `last_hidden_state`, no logits."""
    if target.base_model is target:
        raise ValueError(
            f"{type(target).__name__} does not name the model beneath its head (base_model_prefix "
            f"{target.base_model_prefix!r}), so its states cannot be had without its logits; set the prefix"
        )
    device = run_device(target, ids)
    with _no_autocast(device):
        return target.base_model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            use_cache=False,
            output_hidden_states=[layer + 1 for layer in layers] or False,
            return_dict=True,
        )


def spread(flat: Tensor, live: Tensor) -> Tensor:
    """[T, ...] values of the T true columns of `live` [B, L], in order -> [B, L, ...], zeros elsewhere."""
    out = flat.new_zeros(*live.shape, *flat.shape[1:])
    out[live] = flat
    return out


def _documents(batch: TrainingBatch, live: Tensor) -> list[Tensor]:
    """The tokens of each document of the batch, in order."""
    ids = batch.document_ids
    rows = torch.arange(len(ids), device=ids.device)[:, None] * (ids.max() + 1)
    _, counts = torch.unique_consecutive((rows + ids)[live], return_counts=True)
    if not len(counts):
        raise ValueError("the batch holds no document: document_ids are all 0; drop empty rows from the data set")
    return list(batch.input_ids[live].split(counts.tolist()))


def _groups(lengths: list[int]) -> list[list[int]]:
    """Documents that run together: none shorter than half of the longest, so that padding never doubles the work and
    a batch takes at most log2(longest) passes."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or 2 * lengths[i] < lengths[groups[-1][0]]:
            groups.append([])
        groups[-1].append(i)
    return groups


def _no_autocast(device: torch.device):
    return torch.autocast(device.type, enabled=False)
