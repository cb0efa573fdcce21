"""What training feeds on: hidden states and laws of the target, live and captured."""

import json
import re
import resource
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ScriptedDrafter, ScriptedSession, oracle, tiny_llama
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from targets import TARGETS, VOCAB, TinyTarget, target
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from hf_specdraft.training.capture import CapturedFeatures, capture
from hf_specdraft.training.features import LiveFeatures, TargetLaw
from hf_specdraft.training.records import TrainingBatch

# Lengths of the documents of each row; several beyond the tiny targets' window of 8.
ROWS = ((13, 3, 9), (21,), (1, 12))
LLAMA, TOKENS = TARGETS["llama"].settings, dict(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, pad_token_id=0)
# Beside the targets that generate: scaled laws, a head with a bias, a recurrent model.
MORE = {
    "granite_scaled": TinyTarget("GraniteConfig", "GraniteForCausalLM", dict(LLAMA, logits_scaling=8.0)),
    "hyperclovax_scaled": TinyTarget("HyperCLOVAXConfig", "HyperCLOVAXForCausalLM", dict(LLAMA, logits_scaling=8.0)),
    "cohere": TinyTarget("CohereConfig", "CohereForCausalLM", dict(LLAMA, logit_scale=0.0625)),
    "gemma3_capped": TinyTarget(
        "Gemma3TextConfig", "Gemma3ForCausalLM", dict(TARGETS["gemma3"].settings, final_logit_softcapping=5.0)
    ),
    "phi": TinyTarget("PhiConfig", "PhiForCausalLM", LLAMA),
    "mamba": TinyTarget("MambaConfig", "MambaForCausalLM", dict(TOKENS, hidden_size=32, num_hidden_layers=2)),
}
ARCHITECTURES = (
    *("llama", "qwen2_sliding", "qwen3_moe", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2", "opt", "bloom"),
    *("gpt_neo", *MORE),
)


def model(name):
    if name not in MORE:
        return target(name)
    torch.manual_seed(0)
    config = getattr(transformers, MORE[name].config)(**MORE[name].settings)
    made = getattr(transformers, MORE[name].model)(config).eval()
    bias = made.get_output_embeddings().bias
    if bias is not None:
        nn.init.normal_(bias)
    return made


def rows(shape=ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(1, VOCAB, (sum(lengths),), generator=generator).tolist(),
            "document_ids": [number for number, length in enumerate(lengths, 1) for _ in range(length)],
        }
        for lengths in shape
    ]


def batch_of(rows):
    ids, documents = (
        pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True)
        for name in ("input_ids", "document_ids")
    )
    return TrainingBatch(ids, documents, position_ids=torch.zeros_like(ids), loss_mask=documents > 0)


def same(ours, theirs):
    """Equal up to float32 rounding, which goes with the largest of the values that were added up."""
    torch.testing.assert_close(ours, theirs, atol=1e-5 * max(1.0, float(theirs.abs().max())), rtol=1e-5)


# ---- live --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_documents_are_those_run_alone(name):
    """And the law of every column is the model's own."""
    model_ = model(name)
    batch = batch_of(rows())
    filled = LiveFeatures(model_, (0, -1))(batch)
    law = TargetLaw(model_)
    some = torch.tensor([3, 5, 40])
    for b in range(len(batch.input_ids)):
        for document in range(1, int(batch.document_ids[b].max()) + 1):
            columns = batch.document_ids[b] == document
            with torch.no_grad():
                alone = model_(batch.input_ids[b][columns][None], output_hidden_states=True, use_cache=False)
            same(filled.features[b][columns], torch.cat([alone.hidden_states[i][0] for i in (1, 0)], -1))
            same(law(filled.last_hidden[b][columns]), alone.logits[0])
            same(law(filled.last_hidden[b][columns], some), alone.logits[0][:, some])
    padding = batch.document_ids == 0
    assert padding.any() and not filled.features[padding].any() and not filled.last_hidden[padding].any()
    assert filled.input_ids is batch.input_ids and filled.loss_mask is batch.loss_mask


@pytest.mark.parametrize("law", ["granite_scaled", "hyperclovax_scaled", "cohere", "gemma3_capped", "phi"])
def test_laws_are_more_than_the_head(law):
    """Otherwise the test above would not meet scaling, soft-caps and biases."""
    model_ = model(law)
    filled = LiveFeatures(model_, ())(batch_of(rows()))
    head = model_.get_output_embeddings()
    assert (filled.last_hidden @ head.weight.T - TargetLaw(model_)(filled.last_hidden)).abs().max() > 0.1
    assert filled.features is None


def test_layer_numbers_are_those_of_forward_hooks():
    """Field case 57. The last layer comes after the final norm, as decoding gives it."""
    model_ = four_layers()
    seen = {}
    inner = model_.model
    hooks = [
        inner.layers[i].register_forward_hook(lambda m, args, out, i=i: seen.__setitem__(i, out)) for i in range(4)
    ]
    hooks.append(inner.embed_tokens.register_forward_hook(lambda m, args, out: seen.__setitem__(-1, out)))
    batch = batch_of(rows([(14,)]))
    features = LiveFeatures(model_, (0, 3, -1, 2))(batch).features
    for hook in hooks:
        hook.remove()
    assert torch.equal(features, torch.cat([seen[0], inner.norm(seen[3]), seen[-1], seen[2]], -1))


def four_layers():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**dict(LLAMA, num_hidden_layers=4))).eval()


def test_decoding_sees_the_same_features():
    """What a session is told round by round is what training shows for the same text."""
    model_, layers = four_layers(), (0, 3, -1)
    prompt = torch.tensor([rows([(9,)])[0]["input_ids"]])
    plain = model_.generate(prompt, max_new_tokens=16, do_sample=False)
    told = []

    class Listening(ScriptedSession):
        def observe(self, commit):
            super().observe(commit)
            told.append(commit.features.hidden[0, : commit.features.counts[0]])

    class Listener(ScriptedDrafter):
        feature_layers = layers

        def start(self, view, batch):
            return Listening(self, batch)

    drafter = Listener(plain.tolist(), [oracle(2)], 3)
    out = model_.generate(prompt, assistant_model=drafter, max_new_tokens=16, do_sample=False)
    told = torch.cat(told)
    batch = batch_of([{"input_ids": out[0].tolist(), "document_ids": [1] * out.shape[1]}])
    same(told, LiveFeatures(model_, layers)(batch).features[0, : len(told)])
    assert len(told) >= out.shape[1] - 2


def test_no_gradient_reaches_the_target():
    model_ = tiny_llama()
    before = [p.requires_grad for p in model_.parameters()]
    live, law = LiveFeatures(model_, (0, 1)), TargetLaw(model_)
    model_.train()  # as a trainer's own call of train() might
    filled = live(batch_of(rows()))
    drafter = nn.Linear(64, 32)
    (law(drafter(filled.features) * 0 + filled.last_hidden) * drafter(filled.features).mean()).sum().backward()
    assert drafter.weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in model_.parameters())
    assert [p.requires_grad for p in model_.parameters()] == before and all(before)
    assert not any(module.training for module in model_.modules())


def test_the_target_runs_in_its_own_dtype():
    """Under a trainer's autocast, too; the results' dtype is the caller's choice."""
    model_ = tiny_llama()
    batch, live, law = batch_of(rows()), LiveFeatures(model_, (0,)), TargetLaw(model_)
    plain = live(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = live(batch)
        assert torch.equal(law(cast.last_hidden), law(plain.last_hidden))
    assert torch.equal(cast.features, plain.features) and cast.features.dtype == torch.float32
    assert torch.equal(
        LiveFeatures(model_, (0,), dtype=torch.bfloat16)(batch).features, plain.features.to(torch.bfloat16)
    )
    half = tiny_llama().bfloat16()
    states = LiveFeatures(half, (0,))(batch)
    assert states.features.dtype == TargetLaw(half)(states.last_hidden).dtype == torch.bfloat16


def test_nothing_asked_for_costs_nothing():
    model_ = tiny_llama()
    model_.model.register_forward_pre_hook(lambda *_: pytest.fail("the target ran"))
    batch = batch_of(rows())
    assert LiveFeatures(model_, (), law=False)(batch) is batch
    # Nor are the logits of a batch ever made.
    model_ = tiny_llama()
    model_.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("the head ran"))
    assert LiveFeatures(model_, (0,), law=False)(batch).last_hidden is None


def test_padding_never_doubles_the_work():
    model_, sizes = tiny_llama(), []
    model_.model.register_forward_pre_hook(
        lambda m, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    batch = batch_of(rows([(100, 2, 3, 60), (5, 50, 2)]))
    LiveFeatures(model_, (0,))(batch)
    assert sum(sizes) <= 2 * int((batch.document_ids > 0).sum()) and len(sizes) <= 4


def test_an_adapter_is_part_of_the_target():
    torch.manual_seed(0)
    base = tiny_llama()
    batch = batch_of(rows([(21,)]))
    without = LiveFeatures(base, (0,))(batch)
    tuned = get_peft_model(base, LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)).eval()
    filled = LiveFeatures(tuned, (0,))(batch)
    assert not torch.allclose(filled.features, without.features, atol=1e-2)
    with torch.no_grad():
        logits = tuned(batch.input_ids).logits
    law = TargetLaw(tuned)
    same(law(filled.last_hidden), logits)
    same(law(filled.last_hidden, torch.tensor([1, 7])), logits[..., [1, 7]])


def test_laws_of_packed_heads_and_changing_vocabularies():
    class Packed(nn.Linear):
        """Stands for a quantised layer: its weight means something only to itself."""

        def forward(self, hidden):
            return super().forward(hidden) / 2

    model_ = tiny_llama()
    plain = TargetLaw(model_)
    hidden = torch.randn(2, 5, 32)
    whole = plain(hidden)
    for ids in ([1, 5], [2, 9, 11], [2, 9, 12]):
        same(plain(hidden, torch.tensor(ids)), whole[..., ids])
    packed = Packed(32, VOCAB, bias=False)
    packed.weight = nn.Parameter(2 * model_.lm_head.weight.detach())
    model_.set_output_embeddings(packed)
    same(TargetLaw(model_)(hidden, torch.tensor([1, 5])), whole[..., [1, 5]])


def test_a_law_of_another_form_is_refused():
    class Shifted(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits + torch.arange(VOCAB)
            return out

    with pytest.raises(ValueError, match="model type 'llama'"):
        TargetLaw(Shifted(tiny_llama().config))


def test_live_refusals():
    for layer in (2, -2):
        with pytest.raises(ValueError, match=f"no layer {layer} .* 0 to 1"):
            LiveFeatures(tiny_llama(), (0, layer))
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        LiveFeatures(t5, (0,))
    empty = batch_of(rows())
    empty.document_ids.zero_()
    with pytest.raises(ValueError, match="no document"):
        LiveFeatures(tiny_llama(), (0,))(empty)


# ---- captured ----------------------------------------------------------------------------------------------------


def taken(dataset, *index):
    return batch_of([dataset[i] for i in index]), torch.tensor(index)


@pytest.fixture
def dataset():
    return Dataset.from_list(rows(ROWS * 2))


def test_captured_and_live_batches_are_identical(tmp_path, dataset):
    """The same rows run together give the same bits; other companions change the order of a sum here and there, so
    then equal up to float32 rounding. In a narrower storage dtype, live values rounded to it."""
    model_, layers = tiny_llama(), (1, -1)
    live = LiveFeatures(model_, layers)
    # About two rows run together, and each such pair is a shard: rows 0 and 1.
    together = dict(batch_tokens=60, shard_bytes=2 * 26 * (96 * 4 + 8))
    captured = capture(model_, dataset, layers, tmp_path / "f32", **together)
    assert captured.manifest["shards"][0] == [0, 2] and len(captured.manifest["shards"]) > 1
    batch, index = taken(dataset, 0, 1)
    ours, theirs = captured(batch, index), live(batch, index)
    assert torch.equal(ours.features, theirs.features) and torch.equal(ours.last_hidden, theirs.last_hidden)
    batch, index = taken(dataset, 5, 0, 2)
    ours, theirs = captured(batch, index), live(batch, index)
    same(ours.features, theirs.features)
    same(ours.last_hidden, theirs.last_hidden)
    assert ours.input_ids is batch.input_ids

    half = capture(model_, dataset, layers, tmp_path / "bf16", dtype=torch.bfloat16, law=False, **together)
    batch, index = taken(dataset, 0, 1)
    assert torch.equal(half(batch, index).features, live(batch, index).features.to(torch.bfloat16))
    assert half(batch, index).last_hidden is None


def test_size_is_announced_capped_and_checked(tmp_path, capsys, monkeypatch):
    """Field case 59: 100 samples of 512 tokens, 3 layers."""
    model_ = four_layers()
    dataset = Dataset.from_list(rows([(512,)] * 100))
    folder = tmp_path / "features"
    arguments = (model_, dataset, (0, 1, 2), folder)
    model_.model.layers[0].register_forward_pre_hook(
        lambda m, args: pytest.fail("it started") if args[0].shape[1] > 1 else None
    )
    with pytest.raises(ValueError, match=r"51,200 tokens.* over the cap of 1.0 MiB.*LiveFeatures"):
        capture(*arguments, cap_bytes=2**20)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
        with pytest.raises(ValueError, match=r"has 1.0 MiB; .*LiveFeatures"):
            capture(*arguments)
    assert not folder.exists()
    model_.model.layers[0]._forward_pre_hooks.clear()
    capsys.readouterr()
    capture(*arguments)
    printed = re.search(r"take ([\d.]+) MiB", capsys.readouterr().out)
    stored = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    assert float(printed[1]) == pytest.approx(stored, rel=0.1) and stored > 20


def test_values_that_are_not_finite_stop_the_run(tmp_path, dataset):
    """Field case 59: overflow in half precision, and a NaN of the target itself."""
    model_ = four_layers()
    model_.model.layers[1].mlp.down_proj.weight.data *= 1e5
    with pytest.raises(ValueError, match=r"layer 1 of LlamaForCausalLM has .* torch.float16 .*runs in torch.float32"):
        capture(model_, dataset, (0, 1), tmp_path, dtype=torch.float16)
    assert not list(tmp_path.glob("*.safetensors")) and not list(tmp_path.glob("*.partial"))
    model_.model.layers[1].mlp.down_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"layer 1 and layer 2 and the last hidden state of .* torch.float32"):
        LiveFeatures(model_, (0, 1, 2))(taken(dataset, 0)[0])


def test_a_full_disk_loses_nothing_finished(tmp_path):
    """A limit on the size of files makes the operating system refuse the second shard in the middle."""
    model_, folder = tiny_llama(), tmp_path / "features"
    data = Dataset.from_list(rows([(10,), (400,), (12,)]))
    passes = []
    model_.model.register_forward_pre_hook(
        lambda m, args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        with pytest.raises(OSError, match=r"cannot write features-00001.safetensors .*run the same capture again"):
            capture(model_, data, (0,), folder, shard_bytes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(file.name for file in folder.iterdir()) == ["features-00000.safetensors", "manifest.json"]
    with pytest.raises(ValueError, match="not finished: 2 of 3 shards"):
        CapturedFeatures(folder)
    (folder / "features-00001.safetensors.partial").write_bytes(b"of a run that was killed")
    (folder / "features-00002.safetensors").write_bytes(b"cut off by a crash")

    first = (folder / "features-00000.safetensors").stat().st_mtime_ns
    passes.clear()
    captured = capture(model_, data, (0,), folder, shard_bytes=1)
    assert (folder / "features-00000.safetensors").stat().st_mtime_ns == first
    # One token for the size, the finished shard's first row to know the target by, the two rows missing.
    assert passes == [1, 10, 400, 12]
    assert not list(folder.glob("*.partial"))
    batch, index = taken(data, 2, 1, 0)
    same(captured(batch, index).features, LiveFeatures(model_, (0,))(batch).features)


def test_partial_files_are_removed(tmp_path, dataset, monkeypatch):
    """Also where the failure comes with the file written and not yet in its place."""

    def full(source, place):
        assert Path(source).is_file()
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="cannot write manifest.json .*No space left"):
        capture(tiny_llama(), dataset, (0,), tmp_path)
    assert not list(tmp_path.iterdir())


def test_captures_of_something_else_are_refused(tmp_path, dataset):
    model_, other_data = tiny_llama(), Dataset.from_list(rows(ROWS * 2, seed=1))
    with pytest.raises(ValueError, match="no captured features"):
        CapturedFeatures(tmp_path)
    captured = capture(model_, dataset, (0,), tmp_path, law=False)
    CapturedFeatures(tmp_path, dataset, model_, (0,), law=False)
    fine_tuned = tiny_llama()
    fine_tuned.model.layers[0].mlp.down_proj.weight.data *= 1.05
    refusals = [
        (dict(dataset=other_data), "dataset"),
        (dict(layers=(1,)), r"layers \[0\], not \[1\]"),
        (dict(law=True), "law False, not True"),
        (dict(target=tiny_llama(seed=1)), "another target"),
        (dict(target=fine_tuned), "another target"),
    ]
    for wanted, message in refusals:
        with pytest.raises(ValueError, match=message):
            CapturedFeatures(tmp_path, **wanted)
    for arguments in [(model_, other_data, (0,)), (model_, dataset, (1,)), (tiny_llama(seed=1), dataset, (0,))]:
        with pytest.raises(ValueError, match="dataset|layers|another target"):
            capture(*arguments, tmp_path, law=False)
    batch, index = taken(dataset, 0, 1)
    with pytest.raises(ValueError, match="row 1 has other input_ids"):
        captured(batch, index.flip(0))
    with pytest.raises(ValueError, match="no row 6"):
        captured(batch, torch.tensor([0, 6]))
    with pytest.raises(ValueError, match="index"):
        captured(batch, None)
    assert json.loads(Path(tmp_path, "manifest.json").read_text())["layers"] == [0]


def test_data_that_cannot_be_captured(tmp_path, dataset):
    model_ = tiny_llama()
    with pytest.raises(ValueError, match="no column document_ids"):
        capture(model_, dataset.remove_columns("document_ids"), (0,), tmp_path)
    with pytest.raises(ValueError, match="empty"):
        capture(model_, dataset.select([]), (0,), tmp_path)
    broken = Dataset.from_list([{"input_ids": [1, 2], "document_ids": [1]}])
    with pytest.raises(ValueError, match="row 0 of the data set has 2 tokens"):
        capture(model_, broken, (0,), tmp_path)
    with pytest.raises(ValueError, match="cannot be stored as float64"):
        capture(model_, dataset, (0,), tmp_path, dtype=torch.float64)
    with pytest.raises(ValueError, match="nothing to capture"):
        capture(model_, dataset, (), tmp_path, law=False)
    assert not list(tmp_path.iterdir())
