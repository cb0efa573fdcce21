"""SpecDec++: which token the head rates, what it learns, published heads, and decoding with one."""

from __future__ import annotations

import pytest
import torch
from conftest import tiny_llama
from safetensors.torch import save_file
from scripted import prompts
from test_sampling_law import PROMPT, REQUESTS, TOKENS, V, exact_law, p_value
from test_sampling_law import target as law_target
from test_unroll_assistant import DOCUMENTS, pack

from hf_specdraft.acceptance import AcceptanceHead, load_published
from hf_specdraft.draft import Commit, Context
from hf_specdraft.drafters import TargetView
from hf_specdraft.drafters.assistant import AssistantConfig, AssistantDrafter
from hf_specdraft.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from hf_specdraft.policies import FixedLength, Situation
from hf_specdraft.policies.specdecpp import SpecDecPP
from hf_specdraft.training.features import LiveFeatures, TargetLaw
from hf_specdraft.training.loss import DraftLoss


def assistant(seed: int = 3, **fields) -> AssistantDrafter:
    return AssistantDrafter.from_model(tiny_llama(seed), **{"acceptance_head": {"num_layers": 1}, **fields}).eval()


def eagle3(**fields) -> Eagle3Drafter:
    torch.manual_seed(2)
    return Eagle3Drafter(Eagle3Config.tiny(**{"acceptance_head": {}, **fields})).eval()


def saying(drafter, bias: float):
    """The drafter with a head that says sigmoid(bias), whatever it reads."""
    with torch.no_grad():
        drafter.acceptance_head.out.weight.zero_()
        drafter.acceptance_head.out.bias.copy_(torch.tensor([0.0, bias]))
    return drafter


# Deciding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [assistant, eagle3])
@pytest.mark.parametrize("bias, length", [(30.0, 6), (-30.0, 2)])
def test_a_sure_head_drafts_on_and_an_unsure_one_stops_at_two(make, bias, length):
    target, inputs = tiny_llama(), prompts(3)
    drafter = saying(make(policy="specdecpp", num_assistant_tokens=6), bias)
    request = dict(max_new_tokens=24, do_sample=False, return_dict_in_generate=True)
    out = target.generate(**inputs, assistant_model=drafter, **request)
    assert torch.equal(out.sequences, target.generate(**inputs, **request).sequences)
    rounds = sum(out.speculation.rounds)
    # Only a row's last rounds, which have less room, draft less.
    assert length * (rounds - 3 * length) < out.speculation.drafted <= length * rounds


def test_a_draft_ends_one_token_behind_the_one_that_is_rated_bad():
    """Off by one: the states that give token n's law are those after reading token n - 1."""
    drafter = assistant(policy="fixed")
    view = TargetView(tiny_llama())

    def session():
        made = drafter.start(view, 1)
        made.observe(Commit([[5, 6, 7]]))
        return made

    context = lambda more: Context(torch.tensor([7]), [2], [6], 6, more=more)  # noqa: E731
    whole = session().propose(context(lambda partial: [True])).tokens[0].tolist()
    marked = whole[2]
    assert marked not in whole[:2]
    states = drafter.model(input_ids=torch.tensor([[5, 6, 7, *whole]]), output_hidden_states=True).hidden_states[-1][0]
    bad = states[3 + 2]  # after reading the marked token

    class Stub(torch.nn.Module):
        def forward(self, hidden):
            return 1.0 - torch.isclose(hidden, bad, atol=1e-4).all(-1).float()

    policy = SpecDecPP(Situation(None, drafter, 1, 8, FixedLength(6)))
    policy.head = Stub()
    draft = session().propose(context(policy.more))
    assert draft.tokens[0].tolist() == whole[:4], "the third token is rated bad once the fourth is drawn"


@pytest.mark.parametrize("threshold, length", [(0.05, 2), (0.3, 4), (0.5, 6)])
def test_the_product_of_all_ratings_decides(threshold, length):
    drafter = saying(assistant(), 2.0)  # 0.88 each; products from the second token on: 0.88, 0.78, 0.68, 0.60
    policy = SpecDecPP(Situation(None, drafter, 1, 8, FixedLength(6)), threshold=threshold)
    session = drafter.start(TargetView(tiny_llama()), 1)
    session.observe(Commit([[5, 6, 7]]))
    draft = session.propose(Context(torch.tensor([7]), [2], [6], 6, more=policy.more))
    assert int(draft.valid.sum()) == length


def test_sampled_output_has_the_targets_law():
    """With a head that stops some drafts at two tokens, some later."""
    torch.manual_seed(4)
    fields = dict(num_assistant_tokens=4, policy={"name": "specdecpp", "threshold": 0.6, "shortest": 2})
    drafter = AssistantDrafter.from_model(tiny_llama(3, vocab=V), acceptance_head={"num_layers": 0}, **fields).eval()
    out = law_target().generate(
        torch.tensor([PROMPT] * 2500),
        do_sample=True,
        max_new_tokens=6,
        assistant_model=drafter,
        return_dict_in_generate=True,
        **REQUESTS["temperature"].settings,
    )
    assert p_value(out.sequences[:, len(PROMPT) :][:, :TOKENS], exact_law("temperature")) > 1e-4
    counts = out.speculation.offered_by_depth
    assert 0.1 * counts[1] < counts[2] < 0.9 * counts[1]


# Weights --------------------------------------------------------------------------------------------------------------


def published(width: int = 16, layers: int = 3, repeated: bool = True) -> dict:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(width, width, generator=generator), torch.randn(width, generator=generator)
    count = layers if repeated else 1
    state = {f"model.{i}.linear.{k}": t.clone() for i in range(count) for k, t in zip(("weight", "bias"), shared)}
    state[f"model.{layers}.weight"] = torch.randn(2, width, generator=generator)
    return state | {f"model.{layers}.bias": torch.randn(2, generator=generator)}


@pytest.mark.parametrize("repeated", [True, False])
def test_published_heads_load_with_their_one_shared_block(repeated, tmp_path):
    """By the published forward, written out: x + SiLU(W x + b) three times over with the same W."""
    state = published(repeated=repeated)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"hidden_size": 16, "num_layers": 3}')
    options, tensors = load_published(tmp_path)
    head = AcceptanceHead(16, **options)
    head.take_published(tensors)
    x = hidden = torch.randn(5, 16)
    for _ in range(3):
        x = x + torch.nn.functional.silu(x @ state["model.0.linear.weight"].T + state["model.0.linear.bias"])
    expected = (x @ state["model.3.weight"].T + state["model.3.bias"]).softmax(-1)[:, 1]
    torch.testing.assert_close(head(hidden), expected)
    assert {name: t.shape for name, t in head.published().items()} == {n: t.shape for n, t in published().items()}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda s: s | {"model.1.linear.weight": torch.zeros(16, 16)}, "blocks differ"),
        (lambda s: {k: v for k, v in s.items() if k != "model.3.bias"}, "3 layers and width 16"),
        (lambda s: published(width=8), "3 layers and width 16"),
        (lambda s: published(layers=2), "3 layers and width 16"),
    ],
)
def test_heads_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        AcceptanceHead(16, 3).take_published(change(published()))


@pytest.mark.parametrize("make", [assistant, eagle3])
def test_heads_stay_in_float32_and_are_saved(make, tmp_path):
    drafter = make()
    drafter.save_pretrained(tmp_path)
    again = type(drafter).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.acceptance_head.linear.weight.dtype == torch.float32 and again.dtype == torch.bfloat16
    assert torch.equal(again.acceptance_head.out.weight, drafter.acceptance_head.out.weight)


def test_unknown_options_are_refused():
    with pytest.raises(ValueError, match="layers.*num_layers"):
        assistant(acceptance_head={"layers": 2})


# Training -------------------------------------------------------------------------------------------------------------


def batch_of(target):
    batch = pack([[DOCUMENTS[0], DOCUMENTS[1]], [DOCUMENTS[2]]])
    return LiveFeatures(target, ())(batch)


def test_the_mixture_is_the_assistants_own_words_in_the_targets_text():
    drafter, target = assistant(), tiny_llama()
    batch, view = batch_of(target), TargetView(target)
    unrolled = drafter.unroll(view, batch, mix=0.4, generator=torch.Generator().manual_seed(0))
    mixture, ids = unrolled.context, batch.input_ids.flatten()
    written = (batch.loss_mask & (batch.document_ids > 0)).flatten()
    assert 0 < mixture.judged.sum() < written.sum() and not (mixture.judged & ~written).any()
    mixed = torch.where(mixture.judged, mixture.tokens, ids)
    start, length = 14, 6  # the second document, behind the first in its row
    alone = mixed[start : start + length]
    with torch.no_grad():
        states = drafter.model(input_ids=alone[None], output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(mixture.states[start : start + length], states, atol=1e-4, rtol=1e-4)


def test_the_term_is_the_weighted_soft_cross_entropy_of_min_1_p_over_q():
    drafter, target = assistant(acceptance_head={"num_layers": 1, "reject_weight": 6.0}), tiny_llama()
    batch, view, law = batch_of(target), TargetView(target), TargetLaw(target)
    generator = lambda: torch.Generator().manual_seed(0)  # noqa: E731
    loss = DraftLoss("acceptance")(drafter, view, batch, law, generator=generator())
    unrolled = drafter.unroll(view, batch, generator=generator())
    total, head = 0.0, drafter.acceptance_head
    for (row,), anchor in zip(unrolled.rows.tolist(), unrolled.anchors.tolist()):
        assert row == anchor
        column, mixture = anchor + 1, unrolled.context
        if not mixture.judged[column]:
            continue
        token = int(mixture.tokens[column])
        p = law(batch.last_hidden.flatten(0, 1)[anchor], None).softmax(-1)[token]
        own = drafter.logits(view, unrolled.hidden[(unrolled.anchors == anchor).nonzero()[0, 0], 0]).softmax(-1)[token]
        accept, says = min(1.0, float(p / own.detach())), float(head(mixture.states[column]).detach())
        total -= 6 * (1 - accept) * torch.tensor(1 - says).log() + accept * torch.tensor(says).log()
    torch.testing.assert_close(loss["numerator"], torch.tensor(float(total)), rtol=1e-4, atol=1e-4)


def test_a_head_learns_alone_to_tell_good_tokens_from_bad_ones():
    """Of an assistant that is right about the first half of the vocabulary alone: tokens that are
    rated higher are accepted more often (how often is another matter: the weight of 6 lowers all ratings)."""
    target = tiny_llama()
    drafter = assistant(0)  # the target's own weights
    with torch.no_grad():
        drafter.model.lm_head.weight[32:] = tiny_llama(9).lm_head.weight[32:]
    drafter.requires_grad_(False)
    drafter.acceptance_head.requires_grad_(True)
    view, law, loss = TargetView(target), TargetLaw(target), DraftLoss("acceptance")
    generator = torch.Generator().manual_seed(0)
    texts = [(torch.randint(1, 64, (40,), generator=generator).tolist(), 1) for _ in range(8)]
    batch = LiveFeatures(target, ())(pack([[text] for text in texts]))
    optimizer = torch.optim.Adam(drafter.acceptance_head.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        result = loss(drafter, view, batch, law, generator=generator)
        result["loss"].backward()
        optimizer.step()
        losses.append(float(result["loss"].detach()))
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    with torch.no_grad():
        unrolled = drafter.unroll(view, batch, generator=generator)
        mixture, before = unrolled.context, unrolled.rows[:, 0]
        judged = mixture.judged[before + 1]
        tokens, before = mixture.tokens[before + 1][judged, None], before[judged]
        p = law(batch.last_hidden.flatten(0, 1)[before], None).softmax(-1).gather(1, tokens)
        q = drafter.logits(view, unrolled.hidden[judged, 0]).softmax(-1).gather(1, tokens)
        accept = (p / q).clamp(max=1)[:, 0]
        says = drafter.acceptance_head(mixture.states[before + 1])
    order, third = says.argsort(), len(says) // 3
    low, middle, high = (float(accept[part].mean()) for part in (order[:third], order[third:-third], order[-third:]))
    assert low < middle < high
    # Without the weight of rejections the ratings are chances: where s = a / (a + 6 (1 - a)), a is 6 s / (1 + 5 s).
    chance = 6 * says / (1 + 5 * says)
    assert float(says.mean()) < float(accept.mean()) - 0.05
    for part in (order[:third], order[third:-third], order[-third:]):
        assert float(chance[part].mean()) == pytest.approx(float(accept[part].mean()), abs=0.12)


def test_config_names_the_head():
    config = AssistantConfig.tiny(acceptance_head={"num_layers": 2})
    assert AssistantDrafter(config).acceptance_head.num_layers == 2
