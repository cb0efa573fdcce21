"""Starting an EAGLE-3 drafter from what a few texts say in closed form, instead of from noise.

Two things that gradient descent finds slowly are linear, or a look-up, and can be written down:

- The target's next final state is, for a good part, a linear function of its states and of the next token. The best
  such map is a ridge regression, and a drafter whose residual is that map (`token_residual`) drafts by it before any
  training.
- Texts repeat themselves. With a `token_window` of w, attention heads that compare the last w - 1 tokens with those
  before each earlier row find where the same words stood and read which token came next (an induction head, Olsson et
  al. 2209.11895). Random projections of the embeddings make such heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...training.records import TrainingBatch
from ...training.vocabulary import head_rows
from ..base import TargetView

if TYPE_CHECKING:
    from .modeling_eagle3 import Eagle3Drafter

RIDGE = 100.0  # added to the diagonal of the sums of squares, in units of one row's
COPYING = 2 / 3  # share of the heads that copy
MATCH = 14.0  # logit that one token in common is worth
COPIED = 36.0  # logit that a token gains when every copying head is sure of it
SAMPLE = 4096  # tokens whose embeddings and head rows stand for all
SLOW = 0.625  # angles slower than base ** -SLOW a token hardly turn over a text: those dimensions compare tokens


@torch.no_grad()
def start_eagle3(drafter: Eagle3Drafter, view: TargetView, batches: Iterable[TrainingBatch]) -> None:
    """Set the residual's maps, the final norm and, with two or more tokens in the window, copying heads.

    batches: with features and last_hidden; 100,000 supervised tokens are plenty.
    Raises ValueError for a drafter without token_residual, norm_output and fc_norm, of several layers or of another
    width than the target's, and for texts without supervised tokens.
    """
    config, layer = drafter.config, drafter.layers[0]
    wanted = dict(token_residual=True, norm_output=True, fc_norm=True, norm_before_residual=False, num_hidden_layers=1)
    wanted["hidden_size"] = view.hidden_size
    if any(getattr(config, name) != value for name, value in wanted.items()):
        fields = ", ".join(f"{name}={value}" for name, value in wanted.items())
        raise ValueError(f"only a drafter with {fields} can start in closed form")
    # Sums over the texts: of the inputs of each map by themselves, and by the state to predict.
    maps = (drafter.fc, drafter.fc_next)
    squares = [m.weight.new_zeros(m.in_features, m.in_features) for m in maps]
    products = [m.weight.new_zeros(m.in_features, m.out_features) for m in maps]
    energy, count = drafter.norm.weight.new_zeros(config.hidden_size), 0
    for batch in batches:
        features, before, token, state = _examples(drafter, view, batch)
        energy += state.square().sum(0)
        count += len(state)
        for known, square, product in zip((features, before), squares, products):
            x = torch.cat((known, token), dim=-1)
            square += x.T @ x
            product += x.T @ state
    if not count:
        raise ValueError("the texts to start from hold no supervised tokens")
    size = (energy / count).sqrt().clamp(min=1e-6)  # by channel: the head reads `norm` of the residual
    drafter.norm.weight.copy_(size)
    for linear, square, product in zip(maps, squares, products):
        square.diagonal().add_(RIDGE)
        linear.weight.copy_((torch.linalg.solve(square, product) / size).T)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    if config.token_window > 1:
        _copy_heads(drafter, view, size)


def _examples(drafter: Eagle3Drafter, view: TargetView, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What two maps read, and what both should give, at N tokens whose next one is supervised.

    (normed features before the token [N, n * H], final states before it [N, H], its normed embedding [N, H], its own
    final states [N, H]).
    """
    batch = batch.to(drafter.device)
    documents = batch.document_ids
    wanted = batch.loss_mask[:, 2:] & (documents[:, 1:-1] == documents[:, 2:]) & (batch.position_ids[:, 1:-1] > 0)
    row, column = wanted.nonzero(as_tuple=True)
    parts = batch.features[row, column].to(drafter.dtype).chunk(len(drafter.fc_norm), dim=-1)
    features = torch.cat([norm(part) for norm, part in zip(drafter.fc_norm, parts)], dim=-1)
    token = drafter.token_norm(drafter.embed(batch.input_ids[row, column + 1, None], view))
    before, state = (batch.last_hidden[row, at].to(drafter.dtype) for at in (column, column + 1))
    return features, before, token, state


def _copy_heads(drafter: Eagle3Drafter, view: TargetView, size: Tensor) -> None:
    config, attention = drafter.config, drafter.layers[0].self_attn
    width, span = config.hidden_size, config.head_dim
    random = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    ids = torch.linspace(0, view.vocab_size - 1, SAMPLE).long().to(drafter.device)
    embeds = drafter.token_norm(drafter.embed(ids[:, None], view)).float().cpu()
    rows, size = head_rows(view, ids).float().cpu(), size.float().cpu()
    common = embeds.mean(0)
    common /= common.norm()  # what all embeddings share does not tell one token from another
    # Rotary angles that hardly turn over a text, so that a match counts the same wherever it stands.
    half = torch.arange(int(SLOW * span / 2), span // 2)
    slow = torch.cat((half, half + span // 2))
    deviation = (MATCH * span**0.5 / (len(slow) * width)) ** 0.5
    basis = torch.linalg.qr(random(width, width))[0]
    group = config.num_attention_heads // config.num_key_value_heads
    gained, outputs = torch.zeros_like(rows), []
    for head in range(max(1, round(COPYING * config.num_key_value_heads))):
        query, key, value = torch.zeros(3, span, attention.k_proj.in_features)
        # A query's token k against each key's token k + 1: the key's own token came after the same words.
        for k in range(config.token_window - 1):
            look = deviation * random(len(slow), width)
            look -= (look @ common)[:, None] * common
            query[slow, k * width : (k + 1) * width] = look
            key[slow, (k + 1) * width : (k + 2) * width] = look
        value[:, :width] = basis[torch.arange(head * span, (head + 1) * span) % width]
        keys, queries = (slice(head * n, (head + 1) * n) for n in (span, span * group))
        for part, where, weight in (
            (attention.q_proj, queries, query.repeat(group, 1)),
            (attention.k_proj, keys, key),
            (attention.v_proj, keys, value),
        ):
            part.weight[where] = weight.to(part.weight)
        read = embeds @ value[:, :width].T
        written = torch.linalg.pinv(read) @ rows  # [head_dim, H] from what is read to the token's row of the head
        gained += read @ written
        outputs.append((queries, written))
    scale = COPIED / (gained * rows).sum(-1).mean() / group
    for queries, written in outputs:
        weight = attention.o_proj.weight
        weight[:, queries] = (scale * written / size).T.repeat(1, group).to(weight)
