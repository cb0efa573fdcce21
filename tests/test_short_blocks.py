"""Shorter blocks: training sees what drafting sees, and drafts use the smallest that holds them."""

import pytest
import torch
from conftest import tiny_llama
from test_predraft import text

from hf_specdraft.draft import Commit, Context, Features
from hf_specdraft.drafters import AutoDrafter, TargetView
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter


def drafter(**fields) -> BlockDrafter:
    torch.manual_seed(1)
    return BlockDrafter(BlockConfig.tiny(**{"block_size": 6, "short_blocks": [4, 3], **fields})).eval()


def test_training_at_a_short_block_is_drafting_from_one():
    model, one = tiny_llama(), drafter(short_blocks=[3]).train()
    view, batch = TargetView(model), text(model)
    batch.features = torch.randn(*batch.input_ids.shape, 64)
    unrolled = one.unroll(view, batch, anchors=None, mode={"name": "short", "share": 1.0})
    assert unrolled.mask[:, :2].any() and not unrolled.mask[:, 2:].any()
    whole = one.unroll(view, batch, anchors=None, mode="plain")
    assert torch.equal(whole.mask[:, :2], unrolled.mask[:, :2]) and torch.equal(whole.anchors, unrolled.anchors)
    assert not torch.allclose(whole.hidden[:, :2], unrolled.hidden[:, :2], atol=1e-3), "a short block is no beginning"
    one.eval()
    for i in (3, 7, 11):
        column = int(unrolled.anchors[i])
        session = one.start(view, 1)
        session.observe(
            Commit([batch.input_ids[0, : column + 1].tolist()], Features(batch.features[:1], [column], [0]))
        )
        context = Context(batch.input_ids[0, column : column + 1], [column], [2], 2)
        block = session.block_pass(context, slice(1, 3))
        assert torch.allclose(block.hidden[0], unrolled.hidden[i, :2], atol=1e-5)
    assert one.unroll(view, batch, anchors=None).hidden.allclose(whole.hidden, atol=1e-6), "evaluation is in full"


def test_the_smallest_block_that_holds_the_draft_is_taken(monkeypatch):
    one, sizes = drafter(), []
    embed = one.embed
    monkeypatch.setattr(one, "embed", lambda ids, view=None: sizes.append(ids.shape[1]) or embed(ids, view))
    session = one.start(TargetView(tiny_llama()), 2)
    for depth in range(1, 6):
        draft = session.propose(Context(torch.tensor([4, 5]), [0, 0], [depth, 1], depth))
        assert draft.valid.sum(1).tolist() == [depth, 1]
    assert sizes == [3, 3, 4, 6, 6]


def test_greedy_texts_are_the_same():
    model, one = tiny_llama(), drafter(policy={"name": "forespark", "explore": 2}, predraft={})
    ids = torch.randint(1, 64, (3, 6))
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, assistant_model=one
    )
    assert torch.equal(plain, out)


@pytest.mark.parametrize("sizes", [[1], [6]])
def test_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="short_blocks must lie between 2 and block_size 6"):
        drafter(short_blocks=sizes)


def test_options_of_loading_are_checked_like_those_of_a_config(tmp_path):
    drafter(short_blocks=None).save_pretrained(tmp_path)
    assert AutoDrafter.from_pretrained(tmp_path, short_blocks=[4, 3]).config.short_blocks == [3, 4]
    for options, words in (
        ({"short_blocks": [6]}, "short_blocks must lie between"),
        ({"policy": "sviip"}, "policy must be one of"),
        ({"edit_passes": -1}, "edit_passes must be 0 or more"),
    ):
        with pytest.raises(ValueError, match=words):
            AutoDrafter.from_pretrained(tmp_path, **options)


def test_parts_that_need_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="short_blocks cannot be had with edit_passes"):
        drafter(edit_passes=1)
    with pytest.raises(ValueError, match="with convolution"):
        drafter(convolution={})
    with pytest.raises(ValueError, match="set drafter.short_blocks"):
        model, one = tiny_llama(), drafter(short_blocks=None)
        batch = text(model)
        batch.features = torch.randn(*batch.input_ids.shape, 64)
        one.unroll(TargetView(model), batch, mode="short")
