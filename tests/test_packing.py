"""Packed layers give the same text, are never used when their weights have changed, and come off again."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from conftest import tiny_llama
from scripted import byte_tokenizer, prompts, scripted
from torch import nn
from typer.testing import CliRunner

from hf_specdraft import evaluation, packing
from hf_specdraft.cli import app
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.packing import PackedLinear, pack_linears, unpack


@pytest.fixture(autouse=True)
def _small_layers_pay(monkeypatch):
    monkeypatch.setattr(packing, "PAYS", {torch.float32: (0, 2), torch.bfloat16: (0, 1)})


@pytest.fixture
def products(monkeypatch) -> list[int]:
    """Rows of each packed product."""
    rows, product = [], torch.ops.mkldnn._linear_pointwise

    def counting(x, *rest):
        rows.append(x.numel() // x.shape[-1])
        return product(x, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counting)
    return rows


def linear(dtype=torch.float32, bias=True) -> nn.Linear:
    return nn.Linear(24, 40, bias=bias, dtype=dtype).eval()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_products_are_equal_but_for_rounding(dtype, bias, products):
    if dtype == torch.bfloat16 and not packing.has_bfloat16():
        pytest.skip("this CPU has no bfloat16 instructions")
    layer = linear(dtype, bias)
    for shape in ((24,), (1, 24), (2, 24), (1, 7, 24), (3, 5, 24), (0, 24)):
        x = torch.randn(shape, dtype=dtype)
        plain = layer(x)
        assert pack_linears(layer) == 1
        before = len(products)
        torch.testing.assert_close(layer(x), plain)
        assert len(products) - before == (x.numel() // 24 >= packing.PAYS[dtype][1])
        assert unpack(layer) == 1 and type(layer) is nn.Linear
        assert torch.equal(layer(x), plain)
    strided = torch.randn(4, 48, dtype=dtype)[:, ::2]
    plain = layer(strided)
    pack_linears(layer)
    torch.testing.assert_close(layer(strided), plain)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_text_is_plains(rows, tree, products):
    model = tiny_llama()
    inputs = prompts(rows)
    unpacked = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    drafter = scripted(model, rows, [lambda r: r % 4, lambda r: 4], tree=tree)
    assert pack_linears(model) == sum(type(module) is PackedLinear for module in model.modules()) == 15
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    assisted = model.generate(**inputs, max_new_tokens=24, do_sample=False, assistant_model=drafter)
    assert max(products) >= 5
    assert plain.tolist() == assisted.tolist() == unpacked.tolist()


def test_a_packed_drafter_drafts_the_same(products):
    model = tiny_llama()
    torch.manual_seed(1)
    drafter = BlockDrafter(BlockConfig.tiny(policy="fixed", tree_nodes=6)).eval()
    runs = []
    for _ in range(2):
        out = model.generate(
            **prompts(1), max_new_tokens=16, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
        )
        runs.append((out.sequences.tolist(), out.speculation.offered_by_depth, out.speculation.accepted_by_depth))
        assert pack_linears(drafter) > 0
    assert products and runs[0] == runs[1]


@torch.no_grad()
def test_changed_weights_are_never_served_from_the_old_copy(products):
    x = torch.randn(4, 24)

    def written(layer):
        layer.weight.mul_(2)

    def loaded(layer):
        layer.load_state_dict(linear().state_dict())

    def replaced(layer):
        layer.weight = nn.Parameter(torch.randn(40, 24))

    def reset(layer):
        layer.weight.data = torch.randn(40, 24)

    for change in (written, loaded, replaced, reset):
        layer = linear()
        pack_linears(layer)
        layer(x)
        change(layer)
        used = len(products)
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias)) and len(products) == used
        assert pack_linears(layer) == 1
        layer(x)
        assert len(products) == used + 1
    assert layer.to(torch.float64)(x.double()).dtype == torch.float64 and len(products) == used + 1


def test_gradients_and_autocast_take_the_plain_way(products):
    layer = linear()
    pack_linears(layer)
    layer(torch.randn(4, 24)).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(4, 24)).dtype == torch.bfloat16
    assert not products


@torch.no_grad()
def test_saving_copying_and_tying_go_on(tmp_path, products):
    model = tiny_llama(tie_word_embeddings=True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(1, 9)[None]
    pack_linears(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    copied = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    used = len(products)
    assert torch.equal(copied(ids).logits, loaded(ids).logits) and len(products) == used
    torch.testing.assert_close(model(ids).logits, loaded(ids).logits)
    assert len(products) > used


def test_only_plain_layers_that_pay_are_packed(monkeypatch):
    class Own(nn.Linear):
        pass

    model = nn.Sequential(linear(), Own(24, 24), linear(torch.float16)).eval()
    assert pack_linears(model) == 1 == pack_linears(model)
    unpack(model)
    monkeypatch.setattr(packing, "PAYS", {torch.float32: (24 * 40 + 1, 1)})
    assert pack_linears(model) == 0


def test_refusals(monkeypatch):
    with pytest.raises(ValueError, match="eval"):
        pack_linears(linear().train())
    with pytest.raises(ValueError, match="weights are on meta"):
        pack_linears(nn.Linear(2, 2, device="meta").eval())
    quantised = tiny_llama()
    quantised.is_quantized = True
    with pytest.raises(ValueError, match="without quantisation"):
        pack_linears(quantised)
    monkeypatch.setattr(packing, "has_bfloat16", lambda: False)
    with pytest.raises(ValueError, match="no bfloat16 instructions"):
        pack_linears(linear(torch.bfloat16))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no oneDNN"):
        pack_linears(linear())


def test_commands_pack_target_and_drafter(tmp_path, monkeypatch):
    packed = []
    monkeypatch.setattr(evaluation.inputs, "pack_linears", lambda model: packed.append(type(model).__name__))
    folder = tmp_path / "target"
    tiny_llama(vocab=256).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    asked = tmp_path / "prompts.jsonl"
    asked.write_text(json.dumps({"id": "1", "category": "a", "turns": ["ab"]}))
    common = ["--target", str(folder), "--drafter", str(folder), "--max-new-tokens", "2", "--pack-cpu"]
    for arguments in (["bench", "--prompts", str(asked)], ["check", "--prompts", str(asked)], ["generate", "ab"]):
        result = CliRunner().invoke(app, [*arguments, *common])
        assert result.exit_code == 0, result.output
    assert packed == ["LlamaForCausalLM", "AssistantDrafter"] * 3
