"""The doorway: what is routed and what is not, speculate(), pipelines and PEFT."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from conftest import ScriptedDrafter, adversary, mixed, oracle, tiny_llama
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast, pipeline
from transformers.generation.utils import GenerationMixin

import hf_specdraft
from hf_specdraft import integration
from hf_specdraft.drafters import TargetView
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.ngram import NgramConfig, NgramDrafter

IDS = torch.tensor([[5, 9, 2, 33, 41, 7, 5, 9]])
BATCH = dict(
    input_ids=torch.tensor([[0, 0, 0, 5, 9, 2, 33, 41], [12, 4, 4, 61, 30, 7, 5, 9]]),
    attention_mask=torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8]),
)
GREEDY = dict(max_new_tokens=20, do_sample=False)


def byte_tokenizer(size: int = 256) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:size]
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token=alphabet[0])


class Recorder:
    def __init__(self):
        self.pieces, self.ends = [], 0

    def put(self, value):
        self.pieces += value.view(-1).tolist()

    def end(self):
        self.ends += 1


def scripted(model, inputs, script, length=4, **settings) -> ScriptedDrafter:
    """A drafter that knows plain's answer to `inputs` (unpadded rows)."""
    plain = model.generate(**inputs, **{**GREEDY, **settings})
    width = inputs["input_ids"].shape[1]
    masks = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    rows = [ids[m].tolist() + row[width:].tolist() for ids, m, row in zip(inputs["input_ids"], masks, plain)]
    return ScriptedDrafter(rows, script, length)


# Routing ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def unpatched():
    hf_specdraft.disable()
    yield
    hf_specdraft.enable()


def test_enable_twice_is_enabling_once():
    before = {name: getattr(GenerationMixin, name) for name in integration._ROUTED}
    hf_specdraft.enable()
    assert before == {name: getattr(GenerationMixin, name) for name in integration._ROUTED}
    hf_specdraft.disable()
    try:
        for name, ours in before.items():
            assert getattr(GenerationMixin, name) is ours.__wrapped__
        hf_specdraft.disable()  # nothing left to undo
    finally:
        hf_specdraft.enable()
    assert before == {name: getattr(GenerationMixin, name) for name in integration._ROUTED}


def test_nothing_else_of_generation_is_replaced(unpatched):
    before = dict(vars(GenerationMixin))
    hf_specdraft.enable()
    changed = {name for name, value in vars(GenerationMixin).items() if before.get(name) is not value}
    assert changed == {"_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator"}


@pytest.mark.parametrize(
    "settings",
    [
        dict(assistant_model="causal", do_sample=False),
        dict(assistant_model="causal", do_sample=True, temperature=1.3),
        dict(prompt_lookup_num_tokens=3, do_sample=False),
        dict(do_sample=False, num_beams=2),
    ],
    ids=["assistant", "assistant-sampling", "prompt-lookup", "beams"],
)
def test_others_get_upstreams_results(settings):
    model, assistant = tiny_llama(), tiny_llama(seed=1)

    def call():
        torch.manual_seed(7)
        given = {k: assistant if v == "causal" else v for k, v in settings.items()}
        return model.generate(IDS, max_new_tokens=20, return_dict_in_generate=True, **given)

    ours = call()
    hf_specdraft.disable()
    try:
        theirs = call()
    finally:
        hf_specdraft.enable()
    assert torch.equal(ours.sequences, theirs.sequences) and type(ours) is type(theirs)


def test_upstreams_refusals_stay():
    with pytest.raises(ValueError, match="num_return_sequences has to be 1"):
        tiny_llama().generate(
            IDS, assistant_model=tiny_llama(seed=1), num_return_sequences=2, do_sample=True, max_new_tokens=4
        )


@pytest.mark.parametrize("version", ["5.23.9", "5.25.0", "6.0.0"])
def test_unsupported_version(monkeypatch, unpatched, version):
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(ImportError, match=rf"transformers >= 5\.24\.0, < 5\.25\.0, but {version}.*pip install"):
        hf_specdraft.enable()
    assert not integration._UPSTREAM
    monkeypatch.setattr(transformers, "__version__", "5.24.3")
    hf_specdraft.enable()


# speculate() --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [oracle(4), adversary, mixed(4)], ids=["oracle", "adversary", "mixed"])
@pytest.mark.parametrize("inputs", [dict(input_ids=IDS), BATCH], ids=["row", "batch"])
def test_speculate_equals_plain_without_any_patch(unpatched, inputs, script):
    model = tiny_llama()
    drafter = scripted(model, inputs, [script])
    plain = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, custom_generate=hf_specdraft.speculate(drafter)), plain)


def test_speculate_streams():
    model, streamer = tiny_llama(), Recorder()
    drafter = scripted(model, dict(input_ids=IDS), [mixed(4)])
    out = model.generate(IDS, **GREEDY, custom_generate=hf_specdraft.speculate(drafter, streamer=streamer))
    assert streamer.pieces == out[0].tolist() and streamer.ends == 1


def test_speculate_stops_at_strings():
    model, tokenizer = tiny_llama(vocab=94), byte_tokenizer(94)  # every token a printable character
    plain = model.generate(IDS, **GREEDY)
    stop = tokenizer.decode(plain[0, 13:16])
    settings = dict(stop_strings=[stop], tokenizer=tokenizer)
    stopped = model.generate(IDS, **GREEDY, **settings)
    assert IDS.shape[1] < stopped.shape[1] < plain.shape[1]
    drafter = ScriptedDrafter(plain.tolist(), [oracle(8)], 8, vocab=94)
    assert torch.equal(
        model.generate(IDS, **GREEDY, custom_generate=hf_specdraft.speculate(drafter, **settings)), stopped
    )


def test_speculate_samples_like_the_doorway():
    """One seed, one output, by either way in; and the returned output carries the statistics."""
    model = tiny_llama()
    drafter = scripted(model, dict(input_ids=IDS), [mixed(4)])
    settings = dict(max_new_tokens=20, do_sample=True, temperature=0.8, top_k=20, return_dict_in_generate=True)
    outs = []
    for way in (dict(assistant_model=drafter), dict(custom_generate=hf_specdraft.speculate(drafter))):
        torch.manual_seed(11)
        outs.append(model.generate(IDS, **settings, **way))
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert outs[1].speculation.tokens == [20]
    torch.manual_seed(12)
    other = model.generate(IDS, **settings, assistant_model=drafter)
    assert not torch.equal(other.sequences, outs[0].sequences)


def test_speculate_takes_drafters_only():
    with pytest.raises(ValueError, match="speculate.. takes a drafter of hf_specdraft, got LlamaForCausalLM"):
        hf_specdraft.speculate(tiny_llama())


# Saved folders and pipelines ----------------------------------------------------------------------------------------


def drafters() -> dict:
    return {
        "ngram": NgramDrafter(NgramConfig.tiny()),
        "block": BlockDrafter(BlockConfig.tiny(vocab_size=256, draft_vocab_size=None)).eval(),
    }


@pytest.mark.parametrize("family", ["ngram", "block"])
def test_folders_name_a_class_that_pipelines_find(tmp_path, family):
    drafter = drafters()[family]
    drafter.save_pretrained(tmp_path / "one")
    loaded = AutoModel.from_pretrained(tmp_path / "one")
    loaded.save_pretrained(tmp_path / "two")
    for folder in ("one", "two"):
        names = json.loads((tmp_path / folder / "config.json").read_text())["architectures"]
        assert names == [type(drafter).__name__, "AutoModel"]
        again = hf_specdraft.AutoDrafter.from_pretrained(tmp_path / folder)
        assert type(again) is type(drafter)
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name


def test_a_folder_with_a_tokenizer_of_its_own_keeps_it(tmp_path):
    drafters()["ngram"].save_pretrained(tmp_path)
    assert not hasattr(AutoTokenizer.from_pretrained(tmp_path), "decode")
    byte_tokenizer().save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).decode([3, 4]) == byte_tokenizer().decode([3, 4])


@pytest.mark.parametrize("family", ["ngram", "block"])
@pytest.mark.parametrize("given", ["folder", "object"])
def test_text_generation_pipeline(tmp_path, monkeypatch, family, given):
    drafter, tokenizer, model = drafters()[family], byte_tokenizer(), tiny_llama(vocab=256)
    settings = dict(max_new_tokens=16, do_sample=False, return_full_text=False)
    texts = ["abcabcabc", "xyxyxyxyxy"]
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)(texts, **settings)
    if given == "folder":
        drafter.save_pretrained(tmp_path)
        extra = dict(assistant_model=str(tmp_path))
    else:
        extra = dict(assistant_model=drafter, assistant_tokenizer=tokenizer)
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, **extra)
    assert type(pipe.assistant_model) is type(drafter)
    used = []
    decode = integration.decode
    monkeypatch.setattr(integration, "decode", lambda *args, **kwargs: used.append(1) or decode(*args, **kwargs))
    assert pipe(texts, **settings) == plain
    assert pipe(texts, batch_size=2, **settings) == plain
    assert len(used) == 3  # twice one row, once two


def test_pipeline_takes_an_object_whose_ids_are_the_targets():
    model, tokenizer = tiny_llama(vocab=256), byte_tokenizer()
    drafter = NgramDrafter(NgramConfig.tiny(vocab_size=256, pad_token_id=0))
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, assistant_model=drafter)
    assert pipe.assistant_tokenizer is None
    pipe("abcabc", max_new_tokens=4, do_sample=False)


# PEFT ---------------------------------------------------------------------------------------------------------------


def lora(model, seed: int = 0, name: str = "default", **settings) -> PeftModel:
    """The model with a LoRA adapter that is far from zero."""
    config = LoraConfig(r=4, **{"target_modules": ["q_proj", "v_proj", "down_proj"], **settings})
    wrapped = get_peft_model(model, config, adapter_name=name)
    shake(wrapped, seed, name)
    return wrapped


def shake(wrapped: PeftModel, seed: int, name: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in wrapped.named_parameters():
        if "lora_" in key and f".{name}" in key:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5


def block_drafter() -> BlockDrafter:
    """Borrows the target's embedding and head."""
    borrowed = dict(own_embeddings=False, own_head=False, draft_vocab_size=None)
    return BlockDrafter(BlockConfig.tiny(policy="fixed", **borrowed)).eval()


@pytest.mark.parametrize("drafter", ["oracle", "block"])
def test_lora_target_on_off_and_swapped(drafter):
    """Case S4: each state of the target equals its own plain output, and the drafter is the same one throughout."""
    target = lora(tiny_llama(), seed=1, name="one").eval()
    target.add_adapter("two", target.peft_config["one"])
    shake(target, 2, "two")
    block, answers = block_drafter(), []
    weights = {k: v.clone() for k, v in block.state_dict().items()}
    for adapter in ("one", None, "two", "one"):
        if adapter is not None:
            target.set_adapter(adapter)
        with target.disable_adapter() if adapter is None else torch.no_grad():
            plain = target.generate(input_ids=IDS, **GREEDY)
            used = ScriptedDrafter(plain.tolist(), [oracle(4)], 4) if drafter == "oracle" else block
            out = target.generate(input_ids=IDS, **GREEDY, assistant_model=used, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
        assert drafter == "block" or out.speculation.tau > 4
        answers.append(plain)
    assert not torch.equal(answers[0], answers[1]) and not torch.equal(answers[1], answers[2])
    assert torch.equal(answers[0], answers[3])
    assert all(torch.equal(block.state_dict()[k], v) for k, v in weights.items())


@pytest.mark.parametrize(
    "settings",
    [dict(target_modules=["lm_head", "embed_tokens"]), dict(modules_to_save=["lm_head", "embed_tokens"])],
    ids=["lora", "saved-modules"],
)
def test_an_adapter_of_the_target_never_acts_on_what_the_drafter_borrows(settings):
    model = tiny_llama()
    bare = TargetView(model)
    states, ids = torch.randn(3, 32), torch.tensor([1, 5, 9])
    head, rows = bare.head(states), bare.embed(ids)
    target = lora(model, seed=3, **settings).eval()
    if "modules_to_save" in settings:
        for wrapper in (model.get_output_embeddings(), model.get_input_embeddings()):
            wrapper.modules_to_save["default"].weight.data.mul_(-1.0)
    inner = target.get_base_model()
    assert (inner.get_output_embeddings()(states) - head).abs().max() > 0.1, "the adapter does not act at all"
    assert (inner.get_input_embeddings()(ids) - rows).abs().max() > 0.1
    view = TargetView(inner)
    assert torch.equal(view.head(states), head) and torch.equal(view.embed(ids), rows)
    plain = target.generate(input_ids=IDS, **GREEDY)
    assert torch.equal(target.generate(input_ids=IDS, **GREEDY, assistant_model=block_drafter()), plain)


def test_lora_drafter():
    """A LoRA-tuned drafter drafts with its adapter, and is recognised beneath the wrapper."""
    model, bare = tiny_llama(), block_drafter()
    plain = model.generate(IDS, **GREEDY)
    wrapped = lora(bare, seed=4).eval()
    firsts = []
    start = BlockDrafter.start

    def recorded(self, view, batch):
        session = start(self, view, batch)
        propose, drafts = session.propose, []
        firsts.append(drafts)
        session.propose = lambda context: drafts.append(propose(context)) or drafts[-1]
        return session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockDrafter, "start", recorded)
        tuned = model.generate(IDS, **GREEDY, assistant_model=wrapped)
        with wrapped.disable_adapter():
            untuned = model.generate(IDS, **GREEDY, assistant_model=wrapped)
    assert torch.equal(tuned, plain) and torch.equal(untuned, plain)
    assert not torch.equal(firsts[0][0].tokens, firsts[1][0].tokens), "the adapter does not act"


def test_prompt_learning_on_a_drafter_is_refused():
    config = PromptTuningConfig(
        task_type="FEATURE_EXTRACTION", num_virtual_tokens=2, token_dim=32, num_layers=2, num_attention_heads=4
    )
    wrapped = get_peft_model(drafters()["block"], config)
    with pytest.raises(ValueError, match="use LoRA on a drafter"):
        tiny_llama().generate(IDS, **GREEDY, assistant_model=wrapped)
