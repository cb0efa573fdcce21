"""DSpark's cuts of one row's draft, and AdaFlash's length: lossless by enumeration, and the scheduler that is not."""

from __future__ import annotations

from types import SimpleNamespace

import bias
import pytest
import torch
from torch.nn import functional as F

from hf_specdraft.draft import Draft
from hf_specdraft.policies import Costs, FixedLength, base
from hf_specdraft.policies.adaflash import AdaFlash
from hf_specdraft.policies.confidence_cut import ConfidenceCut, DSpark, admitted
from hf_specdraft.trees import prune


def situation(costs: Costs | None = None, batch: int = 9, length: int = 2, **drafter):
    made = base.Situation(None, SimpleNamespace(**drafter), batch, 8, FixedLength(length, batch=batch))
    made.costs = lambda: costs
    return made


def rated(*confidence: list[float], kind: str = "pre") -> Draft:
    tokens = torch.zeros(len(confidence), len(confidence[0]), dtype=torch.long)
    return Draft.chain(
        tokens, [tokens.shape[1]] * len(tokens), confidence=torch.tensor(confidence), confidence_kind=kind
    )


def test_a_threshold_cuts_at_the_first_slot_below_it():
    draft = rated([0.9, 0.8, 0.2, 0.2], [0.4, 0.4, 0.4, 0.4], [0.6, 0.5, 0.4, 0.3])
    cut = ConfidenceCut(situation(), threshold=0.5).cut(draft, [True] * 3)
    assert cut.valid.sum(1).tolist() == [2, 0, 4], (
        "of each slot's own chance: 0.9, 0.9, 0.25; 0.4; 0.6, 0.83, 0.8, 0.75"
    )


def test_confidences_that_saw_their_own_token_make_point_rows():
    p1, p2, q1, q2 = bias.tables(0)
    draft, _ = bias.drafts(q1, q2, confidence=torch.full((9, 2), 0.9), confidence_kind="own")
    assert ConfidenceCut(situation()).cut(draft, [True] * 9).law is None, "also of a draft that loses nothing"
    draft.confidence_kind = "pre"
    assert ConfidenceCut(situation()).cut(draft, [True] * 9) is draft


def confident(draft: Draft) -> Draft:
    """With the estimate a DSpark head makes: of each slot given the token before it."""
    sure = draft.law.probs.amax(-1)
    return Draft(
        draft.tokens,
        draft.parents,
        draft.valid,
        draft.law,
        sure.cumprod(1).float(),
        "pre",
        draft.evidence,
        is_chain=True,
    )


@pytest.mark.parametrize(
    "policy",
    [
        lambda: ConfidenceCut(situation(), threshold=0.5),
        lambda: DSpark(situation(Costs({0: 1.0, 2: 1.8}))),
    ],
    ids=["confidence", "dspark"],
)
def test_cuts_leave_the_law_of_the_output(policy):
    assert max(bias.distance(seed, lambda draft: policy().cut(confident(draft), [])) for seed in range(6)) < 1e-12
    kept = [int(policy().cut(confident(bias.drafts(*bias.tables(s)[2:])[0]), []).valid.sum()) for s in range(6)]
    assert 0 < sum(kept) < 6 * 18


# The paper's counter-example ------------------------------------------------------------------------------------------


STEPS = torch.tensor([1.0, 0.5, 0.45])  # per second, with 0, 1, 2 drafts verified


def counter_example(choose) -> float:
    """P(A) as the first token, of a target that says A with 0.7. Tokens are drawn evenly; a second draft is certain
    behind A, and hopeless behind B."""
    p1, even = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.full((2,), 0.5, dtype=torch.float64)
    draft, chances = bias.drafts(even, even.expand(2, 2))
    survival = torch.tensor([[0.8, 0.8], [0.8, 0.8], [0.8, 0.0], [0.8, 0.0]])
    cut = prune(draft, choose(survival), looked_at_token=False)
    return float(bias.output(p1, p1.expand(2, 2), draft, chances, cut).sum(1)[0])


def wherever_it_is_greatest(survival):
    """The scheduler without early stop: it looks past a drop."""
    rate = F.pad(survival.cumsum(1) + 1, (1, 0), value=1.0) * STEPS
    return torch.arange(2) < rate.argmax(1, keepdim=True)


def test_a_scheduler_must_stop_at_the_first_drop():
    assert counter_example(wherever_it_is_greatest) == pytest.approx(0.85)
    assert counter_example(lambda survival: admitted(survival, 1 / STEPS)) == pytest.approx(0.70)


def test_the_scheduler_admits_while_tokens_per_second_grow():
    survival = torch.tensor([[0.9, 0.8, 0.7, 0.1], [0.2, 0.1, 0.1, 0.1], [0.9, 0.1, 0.1, 0.1]])
    free = admitted(survival, torch.ones(5))
    assert free.all(), "a pass that costs nothing more takes all"
    dear = admitted(survival, torch.tensor([1.0, 1.3, 1.6, 1.9, 2.2]))
    assert dear.sum(1).tolist() == [3, 0, 1]
    assert DSpark(situation(Costs())).cut(rated([0.1, 0.1]), [True]).shape[1] == 2, "nothing is known yet"


# AdaFlash's length ----------------------------------------------------------------------------------------------------


def adaflash(**options) -> AdaFlash:
    drafter = dict(length_head=object(), config=SimpleNamespace(num_drafts=3))
    made = AdaFlash(situation(length=3, batch=2, **drafter), **options)
    made.before([0, 1])
    return made


def shares(*share: float) -> Draft:
    draft = rated(*[[0.9] * 3] * len(share))
    draft.evidence = SimpleNamespace(share=torch.tensor(share))
    return draft


def test_the_share_says_how_many_tokens_are_verified():
    count = lambda policy, *share: policy.cut(shares(*share), [True] * 2).valid.sum(1).tolist()  # noqa: E731
    assert count(adaflash(), 1.0, 0.0) == [3, 0]  # of four tokens, the anchor included
    assert count(adaflash(), 0.5, 0.75) == [1, 2]
    assert count(adaflash(shortest=2), 0.5, 0.0) == [1, 1]
    assert count(adaflash(rate=1.5), 0.5, 0.75) == [2, 3]
    smooth = adaflash(smoothing=0.5)
    assert count(smooth, 1.0, 1.0) == [3, 3]
    assert count(smooth, 0.5, 1.0) == [2, 3]  # half way from 4 to 2 tokens


def test_no_block_is_drafted_that_the_share_does_not_tell_of():
    drafter = dict(length_head=object(), config=SimpleNamespace(num_drafts=3))
    assert AdaFlash(situation(length=9, batch=2, **drafter)).before([0, 1]) == [3, 3]


def test_exploring_is_seeded():
    def lengths(seed):
        policy = adaflash(explore=0.5, seed=seed)
        return [policy.cut(shares(0.25, 0.25), [True] * 2).valid.sum(1).tolist() for _ in range(20)]

    assert lengths(0) == lengths(0) != lengths(1)
    assert {n for row in lengths(0) for n in row} == {0, 3}


def test_a_length_told_before_drawing_leaves_the_law_of_the_output():
    """A share per context is safe; a share that follows the drawn token is what the enumeration must notice."""
    policy = lambda: AdaFlash(situation(length_head=object(), config=SimpleNamespace(num_drafts=2)))  # noqa: E731

    def cut(share):
        made = policy()
        made.before(list(range(9)))
        return lambda draft: made.cut(replace_share(draft, share(draft)), [])

    assert bias.distance(0, cut(lambda draft: torch.full((9,), 0.6))) < 1e-12
    assert bias.distance(0, cut(lambda draft: (draft.tokens[:, 0] == 0).float())) > 0.01


def replace_share(draft: Draft, share) -> Draft:
    draft.evidence.share = share
    return draft
