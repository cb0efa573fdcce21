"""A drafter started in closed form: a linear map fitted exactly, and heads that copy."""

import pytest
import torch
from test_eagle3 import make_target

from hf_specdraft.drafters import TargetView
from hf_specdraft.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from hf_specdraft.drafters.ngram import NgramConfig, NgramDrafter
from hf_specdraft.training.features import LiveFeatures
from hf_specdraft.training.records import TrainingBatch
from hf_specdraft.training.simulation import simulated_tau

WIDE = dict(vocab_size=512, hidden_size=128, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True)


def batch_of(texts: torch.Tensor, prompt: int = 1) -> TrainingBatch:
    columns = torch.arange(texts.shape[1]).expand_as(texts)
    return TrainingBatch(texts, torch.ones_like(texts), columns, columns >= prompt)


def make(target, **overrides) -> Eagle3Drafter:
    torch.manual_seed(0)
    fields = dict(token_window=3, token_residual=True, target_layer_ids=[0, 1], own_head=True)
    drafter = Eagle3Drafter(Eagle3Config.for_target(target.config, **{**fields, **overrides})).eval()
    return drafter.initialise_from(target)


def right(drafter, target, texts, prompt=1) -> torch.Tensor:
    """[A, S] which steps' best token is the text's, and tau."""
    view, batch = TargetView(target), LiveFeatures(target, drafter.feature_layers)(batch_of(texts, prompt))
    with torch.no_grad():
        unrolled = drafter.unroll(view, batch, steps=3, anchors=None)
        best = drafter.target_ids(drafter.logits(view, unrolled.hidden).argmax(-1))
    matches = (best == unrolled.labels) & unrolled.mask
    return matches, simulated_tau(matches, unrolled.anchors, batch)


def test_the_map_is_the_ridge_regression():
    target = make_target.__wrapped__()
    drafter, view = make(target, token_window=1), TargetView(target)
    texts = torch.randint(3, 60, (6, 40), generator=torch.Generator().manual_seed(0))
    live = LiveFeatures(target, drafter.feature_layers)
    drafter.start_from(view, (live(batch_of(part)) for part in texts.split(2)))
    batch = live(batch_of(texts))
    with torch.no_grad():
        token = drafter.token_norm(drafter.embed(texts[:, 1:-1, None], view))
        parts = batch.features[:, :-2].chunk(3, -1)
        x = torch.cat([*(norm(part) for norm, part in zip(drafter.fc_norm, parts)), token], -1).flatten(0, 1).double()
        y = batch.last_hidden[:, 1:-1].flatten(0, 1).double()
        best = torch.linalg.solve(x.T @ x + 100 * torch.eye(x.shape[1]).double(), x.T @ y)
        drafted = drafter.fuse(batch.features[:, :-2], drafter.embed(texts[:, 1:-1, None], view)).flatten(0, 1)
        assert torch.allclose((drafted * drafter.norm.weight).double(), x @ best, atol=1e-3 * float(y.abs().max()))
        # Where the state before is the drafter's own, it stands for the target's final one.
        before = batch.last_hidden[:, :-2]
        x = torch.cat([before, token], -1).flatten(0, 1).double()
        best = torch.linalg.solve(x.T @ x + 100 * torch.eye(x.shape[1]).double(), x.T @ y)
        drafted = drafter.resume(before, drafter.embed(texts[:, 1:-1, None], view)).flatten(0, 1)
        assert torch.allclose((drafted * drafter.norm.weight).double(), x @ best, atol=1e-3 * float(y.abs().max()))
        # Before training the layer adds nothing, so this map is the whole drafter.
        assert not drafter.layers[0].self_attn.o_proj.weight.any() and not drafter.layers[0].mlp.down_proj.weight.any()


def test_copying_heads_find_what_followed_the_same_two_tokens():
    target = make_target.__wrapped__(**WIDE)
    generator = torch.Generator().manual_seed(1)
    # One phrase twice, its words in other company in between: only two tokens in common tell where to copy from.
    phrase = torch.randperm(500, generator=generator)[:20] + 5
    texts = torch.cat((phrase, phrase.roll(7).flip(0), phrase))[None]
    taus = {}
    for window in (1, 3):
        drafter = make(target, token_window=window)
        noise = torch.randint(5, 505, (8, 40), generator=torch.Generator().manual_seed(2))
        drafter.start_from(TargetView(target), [LiveFeatures(target, drafter.feature_layers)(batch_of(noise))])
        matches, taus[window] = right(drafter, target, texts, prompt=42)
    assert matches[:-2].float().mean() > 0.9
    assert taus[3] > 3 > 1.5 > taus[1]


def test_what_cannot_start_is_refused():
    target = make_target()
    view = TargetView(target)
    with pytest.raises(ValueError, match="token_residual=True"):
        make(target, token_residual=False, token_window=1).start_from(view, [])
    with pytest.raises(ValueError, match="no supervised tokens"):
        make(target).start_from(view, [])
    with pytest.raises(ValueError, match="start_texts"):
        NgramDrafter(NgramConfig()).start_from(view, [])
