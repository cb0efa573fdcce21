"""Objectives and slot weightings against sums written out over the vocabulary, and the checks of their papers."""

import math

import pytest
import torch

from hf_specdraft.training import objectives
from hf_specdraft.training.objectives import OBJECTIVES, WEIGHTINGS, resolve

K = 7
LABELS = torch.tensor([[3, 0, -1], [6, 2, 2]])


def laws(scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    draft = scale * torch.randn(2, 3, K, dtype=torch.float64)
    return draft.requires_grad_(), scale * torch.randn(2, 3, K, dtype=torch.float64)


def softmax(logits: list[float], temperature: float = 1.0) -> list[float]:
    powers = [math.exp(x / temperature) for x in logits]
    return [x / sum(powers) for x in powers]


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q))


def mixed(p, q, beta):
    m = [beta * a + (1 - beta) * b for a, b in zip(p, q)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def accepted(p, q):
    return sum(min(a, b) for a, b in zip(p, q))


def lk_mixed(p, q, eta):
    share = math.exp(-eta * accepted(p, q))
    return share * kl(p, q) + (1 - share) * (1 - accepted(p, q))


# name, options -> the same of one slot's p, q (at the temperature) and label
NAIVE = [
    ("ce", {}, lambda p, q, label: -math.log(q[label])),
    ("argmax_ce", {}, lambda p, q, label: -math.log(q[p.index(max(p))])),
    ("soft_ce", {}, lambda p, q, label: -sum(a * math.log(b) for a, b in zip(p, q))),
    ("soft_ce", {"temperature": 2.0}, lambda p, q, label: -4 * sum(a * math.log(b) for a, b in zip(p, q))),
    ("forward_kl", {}, lambda p, q, label: kl(p, q)),
    ("forward_kl", {"temperature": 2.0, "clip": 0.3}, lambda p, q, label: 4 * min(kl(p, q), 0.3)),
    ("reverse_kl", {}, lambda p, q, label: kl(q, p)),
    ("reverse_kl", {"temperature": 0.5, "clip": 2.0}, lambda p, q, label: min(kl(q, p), 2.0) / 4),
    ("jsd", {}, lambda p, q, label: mixed(p, q, 0.5)),
    ("jsd", {"beta": 0.9}, lambda p, q, label: mixed(p, q, 0.9)),
    ("tv", {}, lambda p, q, label: 1 - accepted(p, q)),
    ("lk", {}, lambda p, q, label: -math.log(accepted(p, q))),
    ("lk_mix", {}, lambda p, q, label: lk_mixed(p, q, 3.0)),
    ("lk_mix", {"eta": 1.0}, lambda p, q, label: lk_mixed(p, q, 1.0)),
]


@pytest.mark.parametrize("name, options, naive", NAIVE, ids=[f"{n}{o or ''}" for n, o, _ in NAIVE])
def test_equals_sums_written_out(name, options, naive):
    draft, teacher = laws()
    value = resolve("objective", OBJECTIVES, name, options)(draft, teacher, LABELS)
    temperature = options.get("temperature", 1.0)
    for at, label in zip([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)], LABELS.flatten().tolist()):
        p, q = softmax(teacher[at].tolist(), temperature), softmax(draft[at].tolist(), temperature)
        assert value[at].item() == pytest.approx(naive(p, q, label) if label >= 0 else 0.0, rel=1e-9), at


@pytest.mark.parametrize("name", sorted({name for name, _, _ in NAIVE} - {"lk_mix"}))
def test_gradient(name):
    draft, teacher = laws(scale=0.7)
    assert torch.autograd.gradcheck(lambda x: OBJECTIVES[name](x, teacher, LABELS), draft)


def test_gradient_of_lk_mix_holds_the_share_fixed():
    draft, teacher = laws(scale=0.7)
    share = (-3 * objectives.acceptance(draft, teacher)).exp().detach()
    parts = objectives.forward_kl(draft, teacher, LABELS), objectives.tv(draft, teacher, LABELS)
    (wanted,) = torch.autograd.grad((share * parts[0] + (1 - share) * parts[1]).sum(), draft)
    (got,) = torch.autograd.grad(objectives.lk_mix(draft, teacher, LABELS).sum(), draft)
    torch.testing.assert_close(got, wanted)


def test_every_objective_is_compared():
    assert {name for name, _, _ in NAIVE} == set(OBJECTIVES)


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl", "jsd", "tv", "lk", "lk_mix"])
def test_identical_laws_are_no_distance_apart(name):
    logits = torch.randn(2, 3, K)
    assert OBJECTIVES[name](logits, logits, LABELS).abs().max() < 1e-6
    # A constant added to logits changes no law.
    assert OBJECTIVES[name](logits + 5, logits, LABELS).abs().max() < 1e-5


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_tokens_that_cannot_be_drafted_contribute_nothing(name):
    draft, teacher = laws()
    value = OBJECTIVES[name](draft, teacher, torch.full((2, 3), -1))
    (gradient,) = torch.autograd.grad(value.sum(), draft)
    assert not value.any() and not gradient.any()


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_finite_where_the_target_forbids_tokens(name):
    draft, teacher = laws()
    teacher[..., 0] = -math.inf
    value = OBJECTIVES[name](draft, teacher, LABELS.clamp(min=1))
    (gradient,) = torch.autograd.grad(value.sum(), draft)
    assert value.isfinite().all() and gradient.isfinite().all()


def test_disjoint_laws():
    draft, teacher = 40 * torch.eye(4)[:2], 40 * torch.eye(4)[2:]
    labels = torch.tensor([2, 3])
    assert objectives.acceptance(draft, teacher).max() < 1e-6
    torch.testing.assert_close(objectives.tv(draft, teacher, labels), torch.ones(2))
    # tv has stopped teaching here; lk has not.
    draft.requires_grad_()
    (flat,) = torch.autograd.grad(objectives.tv(draft, teacher, labels).sum(), draft)
    (steep,) = torch.autograd.grad(objectives.lk(draft, teacher, labels).sum(), draft)
    assert flat.abs().max() < 1e-6 < 0.1 < steep.abs().max()


def test_acceptance_is_what_rejection_sampling_accepts():
    draft, teacher = (logits.detach()[0, 0] for logits in laws())
    q, p = draft.softmax(-1), teacher.softmax(-1)
    drawn = torch.multinomial(q, 40_000, replacement=True)
    kept = (torch.rand(40_000) < (p / q)[drawn]).double().mean()
    assert kept.item() == pytest.approx(objectives.acceptance(draft, teacher).item(), abs=0.01)


def test_confidence_is_best_at_the_acceptance():
    acceptance = torch.tensor([0.2, 0.9])
    logit = acceptance.logit().requires_grad_()
    (gradient,) = torch.autograd.grad(objectives.confidence_bce(logit, acceptance).sum(), logit)
    torch.testing.assert_close(gradient, torch.zeros(2), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        objectives.confidence_bce(logit, acceptance),
        -(acceptance * acceptance.log() + (1 - acceptance) * (1 - acceptance).log()),
    )


MASK = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [False] * 5])


def test_fixed_weightings():
    assert torch.equal(WEIGHTINGS["uniform"](MASK, None), MASK.float())
    torch.testing.assert_close(WEIGHTINGS["decay"](MASK, None, gamma=4.0)[0, 2].item(), math.exp(-0.5))
    torch.testing.assert_close(
        WEIGHTINGS["geometric"](MASK, None)[1], torch.tensor([1, 0.8, 0.64, 0, 0]), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_of_a_sure_drafter_counts_the_slots_that_remain(alpha):
    weights = WEIGHTINGS["dpace"](MASK, torch.ones(3, 5), alpha=alpha)
    assert weights.tolist() == [[5, 4, 3, 2, 1], [3, 2, 1, 0, 0], [0] * 5]


def test_dpace_equals_sums_written_out():
    probs, alpha = torch.rand(3, 5), 0.3
    weights = WEIGHTINGS["dpace"](MASK, probs, alpha=alpha)
    for a in range(3):
        valid = [k for k in range(5) if MASK[a, k]]
        survival = {k: math.prod((1 - alpha) * probs[a, i].item() + alpha for i in range(k + 1)) for k in valid}
        wanted = [sum(survival[k] for k in valid if k >= j) if j in valid else 0.0 for j in range(5)]
        assert weights[a].tolist() == pytest.approx(wanted, rel=1e-5)


def test_dpace_at_alpha_0_is_the_gradient_of_the_expected_accepted_length():
    surprise = torch.rand(1, 5, dtype=torch.float64, requires_grad=True)  # -log of each label's probability
    length = (-surprise).exp().cumprod(-1).sum()
    (wanted,) = torch.autograd.grad(length, surprise)
    weights = WEIGHTINGS["dpace"](MASK[:1], (-surprise.detach()).exp(), alpha=0.0)
    torch.testing.assert_close(weights, -wanted)


@pytest.mark.parametrize(
    "name, options, words",
    [
        ("hinge", {}, "unknown objective 'hinge'; known are ce, "),
        ("tv", {"clip": 1.0}, "tv has no option 'clip'; it has none"),
        ("forward_kl", {"temp": 1.0}, "it has temperature, clip"),
        ("forward_kl", {"temperature": 0}, "a number above 0, got 0"),
        ("forward_kl", {"clip": "1e-2"}, "a number above 0, got '1e-2'"),
        ("jsd", {"beta": 1.0}, "a number between 0 and 1, got 1.0"),
    ],
)
def test_mistakes_of_a_recipe_are_named(name, options, words):
    with pytest.raises(ValueError, match=words):
        resolve("objective", OBJECTIVES, name, options)
