"""The assistant family: acceptance of a perfect drafter, its cache in step, stops without bias, other tokenizers."""

import copy
import gc
import weakref

import pytest
import torch
from conftest import tiny_llama
from scipy.stats import chi2_contingency
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from hf_specdraft import AutoDrafter, policies
from hf_specdraft.draft import Commit, Context
from hf_specdraft.drafters.assistant import AssistantConfig, AssistantDrafter, AssistantSession
from hf_specdraft.drafters.base import TargetView
from hf_specdraft.policies import Threshold

GREEDY = dict(do_sample=False, max_new_tokens=24)


def padded(lengths, vocab=64, width=None):
    width = width or max(lengths)
    ids, mask = torch.zeros(2, len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(1, vocab, (length,))
        mask[row, width - length :] = 1
    return ids, mask


def drafter_for(seed=1, **fields):
    return AssistantDrafter.from_model(tiny_llama(seed), policy="fixed", **fields)


@pytest.mark.parametrize("lengths", [[8], [5, 8, 11, 3]])
def test_a_copy_of_the_target_is_always_right(lengths):
    target = tiny_llama()
    drafter = AssistantDrafter.from_model(tiny_llama(), policy="fixed")
    ids, mask = padded(lengths)
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    out = target.generate(ids, attention_mask=mask, assistant_model=drafter, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(out.sequences, plain)
    assert out.speculation.acceptance == 1.0
    assert out.speculation.rounds == [4] * len(lengths)  # 23 tokens after the prefill's, 6 a round


@pytest.mark.parametrize("lengths", [[8], [5, 8, 11, 3]])
def test_another_model_changes_nothing(lengths):
    target, drafter = tiny_llama(), drafter_for()
    ids, mask = padded(lengths)
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(target.generate(ids, attention_mask=mask, assistant_model=drafter, **GREEDY), plain)


def windowed(seed):
    torch.manual_seed(seed)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    config = MistralConfig(vocab_size=64, num_key_value_heads=2, sliding_window=8, initializer_range=0.5, **shape)
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("make", [tiny_llama, windowed])
def test_proposals_equal_those_of_a_fresh_session(make):
    """Whatever was accepted, and however rows came and went, the cache holds just the committed text."""
    drafter, view = AssistantDrafter.from_model(make(3)), TargetView(tiny_llama())
    texts = [torch.randint(1, 64, (n,)).tolist() for n in (12, 5, 9)]
    session = drafter.start(view, 3)
    session.observe(Commit([list(t) for t in texts]))
    for round, accepted in enumerate([(0, 1, 2), (4, 0, 0), (2, 2, 1), (0, 4, 3)]):
        anchor = torch.tensor([text[-1] for text in texts])
        context = Context(anchor, [len(t) - 1 for t in texts], [4] * len(texts), 4)
        draft = session.propose(context)
        fresh = drafter.start(view, len(texts))
        fresh.observe(Commit([list(t) for t in texts]))
        assert torch.equal(draft.tokens, fresh.propose(context).tokens)
        new = [draft.tokens[b, :n].tolist() + [7] for b, n in enumerate(accepted[: len(texts)])]
        texts = [text + n for text, n in zip(texts, new)]
        session.observe(Commit(new))
        if round == 1:  # a row leaves, and drafting pauses for a while
            session.keep([0, 2])
            texts = [texts[0], texts[2]]
            for _ in range(5):
                session.observe(Commit([[3], [4]]))
            texts = [text + [t] * 5 for text, t in zip(texts, (3, 4))]


def test_an_unsure_token_ends_the_draft_but_stays_in_it():
    drafter, stop = drafter_for(), Threshold(0.999)
    session = drafter.start(TargetView(tiny_llama()), 1)
    session.observe(Commit([[5, 6, 7]]))
    draft = session.propose(Context(torch.tensor([7]), [2], [5], 5, more=stop.more))
    assert draft.valid.sum() == 1 and draft.confidence[0, 0].item() < 0.999
    session.observe(Commit([[9]]))
    sampled = session.propose(Context(torch.tensor([9]), [3], [5], 5, do_sample=True, more=stop.more))
    assert 0 < sampled.valid.sum() < 5
    assert sampled.law.rows.all(), "stopping after the token keeps the row's law"


@pytest.mark.parametrize("in_config", [False, True])
def test_threshold_given_to_generate_acts(in_config):
    target, drafter = tiny_llama(), drafter_for()
    ids, _ = padded([8])
    run = lambda **kwargs: target.generate(  # noqa: E731
        ids, assistant_model=drafter, return_dict_in_generate=True, **GREEDY, **kwargs
    )
    drafted = run().speculation.drafted
    given = {"assistant_confidence_threshold": 0.9999}
    if in_config:
        drafter.config.confidence_threshold, given = 0.9999, {}
    assert run(**given).speculation.drafted < drafted


@pytest.mark.parametrize("nodes, rounds", [(3, 6), (9, 4)])
def test_a_chain_has_no_more_tokens_than_a_tree_would_have_nodes(nodes, rounds):
    target, ids = tiny_llama(), padded([8])[0]
    drafter = AssistantDrafter.from_model(tiny_llama(), policy="fixed", tree_nodes=nodes)
    out = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(out.sequences, target.generate(ids, **GREEDY))
    assert out.speculation.rounds == [rounds]


@pytest.mark.parametrize("target_vocab, own_vocab", [(80, 64), (64, 80)])
def test_padded_vocabularies_of_unequal_size(target_vocab, own_vocab):
    target = tiny_llama(vocab=target_vocab)
    drafter = AssistantDrafter.from_model(tiny_llama(1, vocab=own_vocab), policy="fixed")
    ids, _ = padded([8])
    plain = target.generate(ids, **GREEDY)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **GREEDY), plain)
    target.generate(ids, assistant_model=drafter, do_sample=True, max_new_tokens=24)


def test_save_and_load(tmp_path):
    drafter = AssistantDrafter(AssistantConfig.tiny())
    drafter.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    ids = torch.randint(1, 64, (1, 6))
    for loaded in (AutoDrafter.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert isinstance(loaded, AssistantDrafter)
        assert torch.equal(loaded(ids).logits, drafter.eval()(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).assistant_config.model_type == "llama"
    target = tiny_llama()
    plain = target.generate(ids, **GREEDY)
    assert torch.equal(target.generate(ids, assistant_model=loaded, **GREEDY), plain)


def letters(order: str, bos: bool, merged=()) -> PreTrainedTokenizerFast:
    """A tokenizer over a few letters; `merged` are pairs of letters that are one token."""
    words = ["<unk>", "<s>", *order, *merged]
    tokenizer = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [tuple(m) for m in merged], unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("policy", ["fixed", "auto"])
def test_different_tokenizers(monkeypatch, policy):
    """Field case 50: equal to plain, one start token in the assistant's input, positions of its own length."""
    ours = letters("abcdefgh", bos=False, merged=("ab", "cd", "ef"))
    theirs = letters("hgfedcba", bos=True)
    target = tiny_llama(vocab=len(ours))
    drafter = AssistantDrafter.from_model(tiny_llama(1, vocab=len(theirs)), policy=policy)
    texts = []
    replace = AssistantSession.replace
    monkeypatch.setattr(AssistantSession, "replace", lambda self, new: (texts.extend(new), replace(self, new))[1])
    inputs = ours("abcdabgheffeabcdhg", return_tensors="pt")
    assert len(theirs("abcdabgheffeabcdhg")["input_ids"]) > inputs.input_ids.shape[1] + 1
    for rows in (1, 2):
        ids = inputs.input_ids.repeat(rows, 1)
        plain = target.generate(ids, **GREEDY)
        both = dict(tokenizer=ours, assistant_tokenizer=theirs)
        assert torch.equal(target.generate(ids, assistant_model=drafter, **both, **GREEDY), plain)
    assert texts and all(text[0] == 1 and text.count(1) == 1 for text in texts)


def renumbered(order: list[int]):
    """The target whose token i is `order[i]` of tiny_llama."""
    model = tiny_llama(vocab=len(order))
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight.copy_(weight[order].clone())
    return model


def test_an_assistant_with_other_ids_is_right_and_its_costs_are_kept():
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
    ours, theirs = letters(alphabet, bos=False), letters(alphabet[::-1], bos=False)
    target = tiny_llama(vocab=len(ours))
    assistant = renumbered(ours.convert_tokens_to_ids(theirs.convert_ids_to_tokens(range(len(theirs)))))
    drafter = AssistantDrafter.from_model(assistant)
    both = dict(tokenizer=ours, assistant_tokenizer=theirs)
    ids = ours("hoPe37isfeathers", return_tensors="pt").input_ids
    # Special tokens have no text.
    settings = dict(do_sample=False, max_new_tokens=60, suppress_tokens=[0, 1])
    plain = target.generate(ids, **settings)
    between = drafter.between(ours, theirs)
    assert between is drafter.between(ours, theirs) and between is not drafter.between(theirs, ours)
    for policy in ("fixed", "auto"):
        drafter.config.policy = policy
        out = target.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **both, **settings)
        assert torch.equal(out.sequences, plain)
        assert out.speculation.acceptance > 0.9
    between = drafter.between(ours, theirs)
    assert any(between in costs for costs in policies.costs._measured.values())


def test_what_stands_between_tokenizers_keeps_nobody_alive():
    tokenizer = letters("abc", bos=False)
    drafter = drafter_for()
    between = drafter.between(tokenizer, tokenizer)
    assert (between.is_sequential, between.is_free, between.config) == (True, False, drafter.config)
    assert copy.deepcopy(between).tokenizer is not None
    gone = weakref.ref(drafter)
    del drafter
    gc.collect()
    assert gone() is None


# What is no law


def emissions(drafter, rows=1500, **settings):
    """[rows, 3] sampled tokens, and the target's plain ones."""
    ids = torch.tensor([[1, 4, 2, 5]])
    settings = dict(do_sample=True, max_new_tokens=4, num_return_sequences=rows, temperature=4.0, top_k=0, **settings)
    target = tiny_llama(vocab=8)
    for assistant in (None, drafter):
        torch.manual_seed(11)
        yield target.generate(ids, assistant_model=assistant, **settings)[:, 4:7]


def assert_same_law(ours, plain, vocab=8):
    """Chi-square of the first three tokens, each by itself."""
    for column in range(3):
        table = torch.stack([tokens[:, column].bincount(minlength=vocab) for tokens in (ours, plain)])
        assert chi2_contingency(table[:, table.sum(0) > 0].numpy()).pvalue > 1e-4


RULES = [dict(verification="block"), dict(verification="token"), dict(confidence_threshold=0.3)]
REQUESTS = [{}, dict(repetition_penalty=1.2)]  # the second goes along the accepted path


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("fields", RULES)
def test_an_assistant_that_says_nan_changes_no_law(fields, request_):
    drafter = AssistantDrafter.from_model(tiny_llama(1, vocab=8), policy="fixed", **fields)
    with torch.no_grad():
        drafter.model.lm_head.weight[3] = torch.nan
    plain, ours = emissions(drafter, **request_)
    assert_same_law(ours, plain)


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("fields", RULES)
def test_a_vocabulary_that_is_forbidden_altogether_changes_no_law(fields, request_):
    drafter = AssistantDrafter.from_model(tiny_llama(1, vocab=4), policy="fixed", **fields)
    plain, ours = emissions(drafter, suppress_tokens=[0, 1, 2, 3], **request_)
    assert ours.min() >= 4
    assert_same_law(ours, plain)


# The user's own model


def with_lora(model):
    wrapped = pytest.importorskip("peft").get_peft_model(model, lora())
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return wrapped


def lora():
    return pytest.importorskip("peft").LoraConfig(target_modules=["q_proj", "v_proj"], r=2)


class Scale(torch.nn.Module):
    """A part that transformers did not make and cannot have initialised."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.norm = inner, torch.nn.LayerNorm(32)
        torch.nn.init.normal_(self.norm.weight)

    def forward(self, x):
        return self.norm(self.inner(x))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("change", ["lora", "replaced"])
def test_wrapping_leaves_the_users_model_alone(change, training):
    model = tiny_llama()
    if change == "lora":
        model = with_lora(model)
    else:
        model.model.layers[0].mlp = Scale(model.model.layers[0].mlp)
    model.train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    AssistantDrafter.from_model(model)
    assert not [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert all(module.training is training for module in model.modules())


@pytest.mark.parametrize("lengths", [[8], [5, 8, 11, 3]])
def test_a_peft_copy_of_the_target_is_always_right(lengths):
    target, drafter = with_lora(tiny_llama()), AssistantDrafter.from_model(with_lora(tiny_llama()), policy="fixed")
    ids, mask = padded(lengths)
    inputs = dict(input_ids=ids, attention_mask=mask, **GREEDY)
    plain = target.generate(**inputs)
    assert not torch.equal(plain, tiny_llama().generate(**inputs))
    out = target.generate(**inputs, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert out.speculation.acceptance == 1.0


def test_prompt_learning_adapters_are_refused():
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(tiny_llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="use LoRA"):
        AssistantDrafter.from_model(wrapped)


def test_adapters_are_merged_before_saving(tmp_path):
    wrapped = with_lora(tiny_llama())
    with pytest.raises(ValueError, match="merge_and_unload"):
        AssistantDrafter.from_model(wrapped).save_pretrained(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    want = wrapped(ids).logits
    AssistantDrafter.from_model(wrapped.merge_and_unload()).save_pretrained(tmp_path)
    torch.testing.assert_close(AutoDrafter.from_pretrained(tmp_path)(ids).logits, want)


def test_tied_weights_are_saved_once_and_loaded_tied(tmp_path):
    drafter = AssistantDrafter.from_model(tiny_llama(tie_word_embeddings=True))
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(loaded(ids).logits, drafter(ids).logits)
