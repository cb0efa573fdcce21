"""The frozen target's verdict on drafts at many anchors of a training batch at once (Carryover, 2609.14717)."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..features import selected
from ..target import as_mask, mask_dtype, run_device, tree_form, windows
from .features import plain_model
from .records import TrainingBatch

# Branch columns of a row that run in one pass of the target.
GROUP = 256


class BranchVerifier:
    """Runs the target over drafts, each a branch of its own: it sees the text before its anchor, and itself.

    The text's keys and values are computed once; branches run in groups of about GROUP columns, so that memory does not
    grow with their number.

    target: kept in eval mode; no gradient reaches it. layers: as of LiveFeatures.
    Raises ValueError for a target that takes no mask of its own making (see `tree_form`).
    """

    def __init__(self, target: PreTrainedModel, layers: tuple[int, ...]):
        self.target, self.layers = plain_model(target).eval(), tuple(layers)
        self.form = tree_form(self.target)
        if self.form is None:
            raise ValueError(
                f"{type(self.target).__name__} with {self.target.config._attn_implementation} attention takes no "
                "masks of branches, which Carryover's training verifies its drafts in; load it with "
                "attn_implementation='sdpa', or train without unroll.mode carryover"
            )
        self.windows = windows(self.target)

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch, columns: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """columns: [B, A] of the anchors. drafts: [B, A, K] the tokens drafted there.

        Returns the features [B, A, K, n*Ht] of the drafted tokens, and the token [B, A, 1 + K] that the target chooses
        after the anchor and each of them. On the batch's device.
        """
        self.target.eval()
        device, home = run_device(self.target, batch.input_ids), batch.input_ids.device
        text = {name: getattr(batch, name).to(device) for name in ("input_ids", "document_ids", "position_ids")}
        columns, drafts = columns.to(device), drafts.to(device)
        count, size = drafts.shape[1], 1 + drafts.shape[2]
        ids = torch.cat((text["input_ids"].gather(1, columns)[..., None], drafts), dim=2)
        anchors, documents = (text[name].gather(1, columns) for name in ("position_ids", "document_ids"))
        cache = DynamicCache()  # without a config: whole layers, whatever the target's windows
        with torch.autocast(device.type, enabled=False):
            places, of = text["position_ids"], text["document_ids"]
            seen = (of[:, :, None] == of[:, None]) & (places[:, None] <= places[:, :, None])
            self._run(text["input_ids"], places, places, seen, cache, head=False)
            kept = [(layer.keys, layer.values) for layer in cache.layers]
            features, choices = [], []
            step = max(1, GROUP // size)
            for start in range(0, count, step):
                some = slice(start, start + step)
                at = (anchors[:, some, None] + torch.arange(size, device=device)).flatten(1)
                before = (of[:, None] == documents[:, some, None]) & (places[:, None] < anchors[:, some, None])
                number = torch.arange(at.shape[1], device=device)
                own = (number[:, None] // size == number // size) & (number <= number[:, None])
                seen = torch.cat((before.repeat_interleave(size, 1), own.expand(len(at), -1, -1)), dim=2)
                keys = torch.cat((places, at), dim=1)
                out = self._run(ids[:, some].flatten(1), at, keys, seen, cache, head=True)
                for layer, (k, v) in zip(cache.layers, kept):
                    layer.keys, layer.values = k, v
                hidden = selected(out.hidden_states, self.layers, home).unflatten(1, (-1, size))
                features.append(hidden[:, :, 1:])
                choices.append(out.logits.argmax(-1).unflatten(1, (-1, size)).to(home))
        return torch.cat(features, dim=1), torch.cat(choices, dim=1)

    def _run(self, ids: Tensor, positions: Tensor, keys: Tensor, seen: Tensor, cache: DynamicCache, head: bool):
        """One pass over ids [B, Q] at `positions`, over keys at positions `keys` [B, KV]; seen: [B, Q, KV] bool."""
        masks = {}
        for kind, window in self.windows.items():
            visible = seen
            if window is not None:
                visible = visible & (positions[:, :, None] - keys[:, None] < window)
            masks[kind] = as_mask(visible[:, None], mask_dtype(self.target))
        return (self.target if head else self.target.base_model)(
            input_ids=ids,
            attention_mask=masks if self.form == "dict" else next(iter(masks.values())),
            position_ids=positions,
            cache=cache,
            use_cache=True,
            output_hidden_states=[layer + 1 for layer in self.layers] if head else False,
            return_dict=True,
        )
