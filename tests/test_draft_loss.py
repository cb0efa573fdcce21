"""DraftLoss against the same computed whole in float64, its memory, and simulated decoding against decoding."""

import copy
from dataclasses import replace

import pytest
import torch
from conftest import ScriptedDrafter, ScriptedSession, tiny_llama
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hf_specdraft.draft import Commit, Context, Draft
from hf_specdraft.drafters import Drafter, DrafterConfig, Session, TargetView
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.records import TrainingBatch, Unrolled
from hf_specdraft.training.simulation import simulate, simulated_tau

V, S, H = 64, 4, 32


class TableConfig(DrafterConfig):
    model_type = "specdraft_table"
    policy: str = "fixed"
    draft_ids: list[int] | None = None
    own_head: bool = True


class TableDrafter(Drafter):
    """Slot k's hidden state is looked up by the anchor's token: all that a loss needs of a drafter."""

    config_class = TableConfig

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(V, S * H)
        if config.own_head:
            self.lm_head = nn.Linear(H, len(config.draft_ids or range(V)), bias=False)

    def states(self, ids: Tensor) -> Tensor:
        return self.table(ids).unflatten(-1, (S, H))

    def logits(self, view, hidden):
        return self.lm_head(hidden) if self.config.own_head else view.head(hidden)

    @property
    def draft_token_ids(self):
        return None if self.config.draft_ids is None else torch.tensor(self.config.draft_ids)

    def unroll(self, view, batch, anchors=None):
        """At every supervised column, or at those given."""
        length = batch.input_ids.shape[1]
        if anchors is None:
            anchors = batch.loss_mask.flatten().nonzero().flatten()
        columns = anchors[:, None] + torch.arange(1, S + 1)
        inside = columns < batch.input_ids.numel()
        columns = columns.where(inside, anchors[:, None])
        documents = (batch.document_ids + 100 * torch.arange(len(batch.input_ids))[:, None]).flatten()
        same = (documents[columns] == documents[anchors][:, None]) & (columns // length == anchors[:, None] // length)
        mask = (inside & same & batch.loss_mask.flatten()[columns]).cumprod(1).bool()
        ids = batch.input_ids.flatten()
        # What does not count may be anything.
        labels, rows = ids[columns].where(mask, -100), (columns - 1).where(mask, -1)
        return Unrolled(self.states(ids[anchors]), labels, rows, mask, anchors)

    def start(self, view, batch):
        return TableSession(self, view)


class TableSession(Session):
    def __init__(self, drafter, view):
        self.drafter, self.view = drafter, view

    def observe(self, commit: Commit):
        pass

    def keep(self, rows):
        pass

    def propose(self, context: Context) -> Draft:
        tokens = self.drafter.logits(self.view, self.drafter.states(context.anchor)).argmax(-1)
        ids = self.drafter.draft_token_ids
        tokens = tokens if ids is None else ids[tokens]
        return Draft.chain(tokens[:, : max(context.lengths)], context.lengths)


@pytest.fixture(scope="module")
def target():
    return tiny_llama().requires_grad_(False)


@pytest.fixture(scope="module")
def view(target):
    return TargetView(target)


def make_drafter(**settings) -> TableDrafter:
    torch.manual_seed(0)
    drafter = TableDrafter(TableConfig(num_assistant_tokens=S, **settings))
    nn.init.normal_(drafter.table.weight)
    if drafter.config.own_head:
        nn.init.normal_(drafter.lm_head.weight, std=0.5)
    return drafter


def make_batch() -> TrainingBatch:
    """Two rows: one document with two answers, and two packed documents and padding."""
    torch.manual_seed(1)
    documents = torch.tensor([[1] * 16, [1] * 7 + [2] * 6 + [0] * 3])
    mask = torch.zeros(2, 16, dtype=torch.bool)
    mask[0, 3:8] = mask[0, 10:16] = mask[1, 2:7] = mask[1, 8:13] = True
    positions = torch.tensor([[*range(16)], [*range(7), *range(6), 0, 0, 0]])
    return TrainingBatch(
        torch.randint(V, (2, 16)), documents, positions, mask, last_hidden=torch.randn(2, 16, H, dtype=torch.float64)
    )


HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def law(hidden: Tensor, ids: Tensor | None) -> Tensor:
    """The law of a target whose head is HEAD."""
    weight = HEAD.to(hidden.dtype)
    return hidden @ (weight if ids is None else weight[ids]).T


IDS = list(range(0, V, 3))
TERMS = {"ce": 0.3, "forward_kl": {"weight": 0.5, "temperature": 2.0}, "tv": 0.7}


def naive(drafter, view, batch) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of TERMS weighted by dpace (alpha 0.3): everything whole, slot by slot."""
    out = drafter.unroll(view, batch)
    ids = drafter.draft_token_ids
    ids = list(range(V)) if ids is None else ids.tolist()
    numerator, denominator = 0.0, 0.0
    for a in range(len(out.mask)):
        valid = int(out.mask[a].sum())
        losses, survival, survived = [], [], 1.0
        for k in range(valid):
            logits = drafter.logits(view, out.hidden[a, k])
            teacher = law(batch.last_hidden.flatten(0, 1)[out.rows[a, k]], None)[ids]
            token = out.labels[a, k].item()
            q, p = logits.softmax(0), teacher.softmax(0)
            hot_q, hot_p = (logits / 2).softmax(0), (teacher / 2).softmax(0)
            prob = q[ids.index(token)] if token in ids else torch.zeros(())
            loss = -0.3 * prob.log() + 2.0 * (hot_p * (hot_p / hot_q).log()).sum() + 0.35 * (p - q).abs().sum()
            losses.append(loss if token in ids else 0.0)
            survived = survived * (0.7 * prob.item() + 0.3)
            survival.append(survived)
        for k in range(valid):
            weight = sum(survival[k:])
            numerator, denominator = numerator + weight * losses[k], denominator + weight
    return numerator, torch.tensor(denominator)


@pytest.mark.parametrize("chunk_size", [1, 3, None])
@pytest.mark.parametrize("head", ["own", "trimmed", "borrowed"])
def test_loss_and_gradients_equal_the_whole_computed_slot_by_slot(target, head, chunk_size):
    target = copy.deepcopy(target).double()
    view, batch = TargetView(target), make_batch()
    drafter = make_drafter(own_head=head != "borrowed", draft_ids=IDS if head == "trimmed" else None).double()
    numerator, denominator = naive(drafter, view, batch)
    weights = [p for p in drafter.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(numerator / denominator, weights)

    out = DraftLoss(TERMS, {"dpace": {"alpha": 0.3}}, chunk_size=chunk_size)(drafter, view, batch, law)
    got = torch.autograd.grad(out["loss"], weights)
    torch.testing.assert_close(out["loss"], numerator / denominator, rtol=1e-6, atol=0)
    torch.testing.assert_close(out["denominator"].double(), denominator.double(), rtol=1e-6, atol=0)
    for one, other in zip(got, wanted):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-9)


def test_plain_ce_bit_for_bit(view):
    drafter, batch = make_drafter(), make_batch()
    out = drafter.unroll(view, batch)
    logits = drafter.logits(view, out.hidden)
    plain = nn.functional.cross_entropy(logits[out.mask], out.labels[out.mask], reduction="sum")
    alone = DraftLoss("ce", normalise="count")(drafter, view, batch)
    weighed = DraftLoss({"ce": 1.0, "reverse_kl": 0.0}, normalise="count")(drafter, view, batch, law)
    assert torch.equal(alone["loss"], weighed["loss"])
    torch.testing.assert_close(alone["numerator"], plain)


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
@pytest.mark.parametrize("normalise", ["weights", "count", "anchors"])
def test_four_micro_batches_make_the_step_of_one_batch(view, weighting, normalise):
    drafter, batch = make_drafter(), make_batch()
    loss = DraftLoss({"ce": 0.5, "reverse_kl": {"weight": 0.5, "clip": 10.0}}, weighting, normalise)
    weights = list(drafter.parameters())
    whole = loss(drafter, view, batch, law)
    wanted = torch.autograd.grad(whole["loss"], weights)

    anchors = batch.loss_mask.flatten().nonzero().flatten()
    parts = [dict(anchors=part) for part in anchors.split([9, 5, 1, len(anchors) - 15])]
    # Not known beforehand: gradients of numerators, divided at the end.
    outs = [loss(drafter, view, batch, law, denominator=1, **part) for part in parts]
    total = sum(out["denominator"] for out in outs)
    got = [sum(gradients) / total for gradients in zip(*(torch.autograd.grad(o["loss"], weights) for o in outs))]
    # Known beforehand: every part divided by the whole.
    outs = [loss(drafter, view, batch, law, denominator=total, **part) for part in parts]
    torch.testing.assert_close(sum(out["loss"] for out in outs), whole["loss"])
    known = [sum(gradients) for gradients in zip(*(torch.autograd.grad(o["loss"], weights) for o in outs))]
    for one, two, other in zip(got, known, wanted):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(two, other)


@pytest.mark.parametrize("weighting", ["decay", "dpace"])
def test_an_anchors_weight_is_its_share_of_the_loss(view, weighting, monkeypatch):
    """As of DLoop's first and last stages: none leaves it out, a half counts half."""
    drafter, batch = make_drafter(), make_batch()
    anchors, loss = batch.loss_mask.flatten().nonzero().flatten(), DraftLoss({"ce": 0.5, "reverse_kl": 0.5}, weighting)
    some, rest = (loss(drafter, view, batch, law, anchors=part) for part in (anchors[::2], anchors[1::2]))
    unroll = TableDrafter.unroll

    def weighed(first: float, second: float):
        def unrolled(*args, **options):
            made = unroll(*args, **options)
            return replace(made, weight=torch.tensor([first, second]).repeat(len(anchors))[: len(made.mask)])

        monkeypatch.setattr(TableDrafter, "unroll", unrolled)
        return loss(drafter, view, batch, law, anchors=anchors)

    torch.testing.assert_close(weighed(1.0, 0.0)["loss"], some["loss"])
    for first, second in ((0.5, 0.5), (1.0, 0.5)):
        both = weighed(first, second)
        for name in ("numerator", "denominator"):
            torch.testing.assert_close(both[name], first * some[name] + second * rest[name])


def test_no_anchors_is_no_loss(view):
    drafter, batch = make_drafter(), make_batch()
    out = DraftLoss(TERMS, "dpace", teacher_metrics=True)(
        drafter, view, batch, law, anchors=torch.zeros(0, dtype=torch.long)
    )
    out["loss"].backward()
    assert out["loss"] == 0 and not drafter.table.weight.grad.any()
    assert out["slot_count"].tolist() == out["slot_correct"].tolist() == [0] * S and out["accepted"] == 0


def test_adaflash_clip_in_both_orders(view):
    drafter, batch = make_drafter(), make_batch()
    out = drafter.unroll(view, batch)
    q = drafter.logits(view, out.hidden).log_softmax(-1)[out.mask]
    p = law(batch.last_hidden.flatten(0, 1)[out.rows[out.mask]], None).float().log_softmax(-1)
    values = (q.exp() * (q - p)).sum(-1)
    bound = values.median().item()
    per_token = DraftLoss({"reverse_kl": {"clip": bound}})(drafter, view, batch, law)
    torch.testing.assert_close(per_token["loss"], values.clamp(max=bound).mean())
    published = DraftLoss({"reverse_kl": {"mean_clip": bound / 50}})(drafter, view, batch, law)
    torch.testing.assert_close(published["loss"], (values / len(values)).clamp(max=bound / 50).sum())


class Largest(TorchDispatchMode):
    """The most elements that any tensor with a last dimension of V had."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tensor in tree_iter(results):
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[-1] == V:
                self.elements = max(self.elements, tensor.numel())
        return results


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("chunk_size", [2, None])
def test_logits_of_all_slots_never_exist_at_once(view, own_head, chunk_size):
    drafter, batch = make_drafter(own_head=own_head), make_batch()
    with Largest() as largest:
        DraftLoss(TERMS, "dpace", chunk_size=chunk_size)(drafter, view, batch, law)["loss"].backward()
    anchors = int(batch.loss_mask.sum())
    # The head's weight and its gradient are [V, H], transposed [H, V].
    assert largest.elements == (max(2 * S, H) if chunk_size else anchors * S) * V


def test_chunks_follow_the_byte_budget(view):
    drafter, batch = make_drafter(own_head=False), make_batch()
    with Largest() as largest:
        DraftLoss("ce", chunk_bytes=10 * S * V * 4)(drafter, view, batch)["loss"].backward()
    assert largest.elements == 10 * S * V


def test_under_bfloat16_autocast(view):
    drafter, batch = make_drafter(), make_batch()
    exact = DraftLoss(TERMS)(drafter, view, batch, law)["loss"]
    with torch.autocast("cpu", torch.bfloat16):
        for chunk_size in (3, None):
            out = DraftLoss(TERMS, chunk_size=chunk_size)(drafter, view, batch, law)
            assert out["loss"].dtype == torch.float32
            torch.testing.assert_close(out["loss"], exact, rtol=0.02, atol=0)
            out["loss"].backward()
    assert drafter.lm_head.weight.grad.isfinite().all()


def test_heads_padded_differently(view):
    """The drafter's head has rows that the law lacks, or the other way round: they stand for no token."""
    drafter, batch = make_drafter(), make_batch()
    batch.input_ids.clamp_(max=59)
    full = lambda hidden, ids: law(hidden, ids)[..., :60]  # noqa: E731
    got = DraftLoss(TERMS)(drafter, view, batch, full)["loss"]
    drafter.lm_head.weight = nn.Parameter(drafter.lm_head.weight[:60])
    torch.testing.assert_close(DraftLoss(TERMS)(drafter, view, batch, law)["loss"], got)


def test_metrics(view):
    """A drafter that says what the teacher says is right everywhere but where its vocabulary ends."""
    batch = make_batch()
    drafter = make_drafter(draft_ids=IDS)
    out = drafter.unroll(view, batch)
    drafter.lm_head.weight = nn.Parameter(HEAD[IDS].float())
    states = batch.last_hidden.flatten(0, 1).float()[out.rows.where(out.mask, 0)]
    drafter.unroll = lambda view, batch: Unrolled(states, out.labels, out.rows, out.mask, out.anchors)
    got = DraftLoss("tv", teacher_metrics=True)(drafter, view, batch, law)
    in_vocabulary = torch.isin(out.labels, torch.tensor(IDS)) & out.mask
    assert got["loss"] < 1e-6 and got["slot_count"].tolist() == out.mask.sum(0).tolist()
    assert got["slot_correct"].tolist() == in_vocabulary.sum(0).tolist() != got["slot_count"].tolist()
    torch.testing.assert_close(got["slot_acceptance"], out.mask.sum(0).float())
    said = torch.tensor(IDS)[law(states.double(), torch.tensor(IDS)).argmax(-1)]
    matches = (said == out.labels) & out.mask
    assert torch.equal(got["matches"], matches) and torch.equal(got["anchors"], out.anchors)
    lengths = [row.index(False) if False in row else S for row in matches.tolist()]
    assert got["accepted"].item() == pytest.approx(sum(lengths) / out.mask[:, 0].sum().item())
    without = DraftLoss("ce")(drafter, view, batch)
    assert without["slot_correct"].tolist() == matches.sum(0).tolist() and "slot_acceptance" not in without


def test_the_law_is_asked_only_where_a_term_needs_it(view):
    drafter, batch = make_drafter(), make_batch()

    def refuse(hidden, ids):
        raise AssertionError("asked")

    assert not DraftLoss("ce", "dpace").needs_law
    DraftLoss("ce", "dpace")(drafter, view, batch, refuse)
    assert DraftLoss("tv").needs_law and DraftLoss("ce", teacher_metrics=True).needs_law
    with pytest.raises(AssertionError, match="asked"):
        DraftLoss("tv")(drafter, view, batch, refuse)
    batch.last_hidden = None
    with pytest.raises(ValueError, match="build the features with law=True"):
        DraftLoss("tv")(drafter, view, batch, law)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(terms={}), "known are ce, "),
        (dict(terms={"kl": 1.0}), "unknown objective 'kl'"),
        (dict(terms={"ce": "1"}), "weight of objective ce must be a number"),
        (dict(terms={"tv": {"mean_clip": 0.01}}), "tv has no option 'clip'"),
        (dict(terms={"base_selector_ce": 1.0}), "base_ stands before objectives.*write selector_ce"),
        (dict(terms={"forward_kl": {"mean_clip": 0.01, "clip": 1.0}}), "clip or mean_clip"),
        (
            dict(terms="ce", weighting="linear"),
            "unknown weighting 'linear'; known are uniform, decay, geometric, dpace",
        ),
        (dict(terms="ce", weighting={"decay": {"gama": 4}}), "decay has no option 'gama'; it has gamma"),
        (dict(terms="ce", weighting={"decay": 4}), "options of weighting decay"),
        (dict(terms="ce", weighting={}), "a weighting is one name"),
        (dict(terms="ce", normalise="mean"), "normalise must be one of weights, count, anchors"),
        (dict(terms="ce", chunk_size=0), "chunk_size must be at least 1"),
    ],
)
def test_mistakes_of_a_recipe_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        DraftLoss(**arguments)


# ---- simulated decoding ----


def answers(target, prompts: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
    """Each prompt and the target's greedy answer."""
    return [
        target.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0].tolist()
        for prompt, count in zip(prompts, new_tokens)
    ]


PROMPTS, NEW = [[5, 9, 11], [7, 3, 2, 8, 30], [40, 41]], [40, 23, 2]


def packed(texts: list[list[int]]) -> TrainingBatch:
    """The first two texts in one row, the third in a row of its own."""
    width = len(texts[0]) + len(texts[1])
    ids, documents, positions = (torch.zeros(2, width, dtype=torch.long) for _ in range(3))
    mask = torch.zeros(2, width, dtype=torch.bool)
    for index, (row, start) in enumerate([(0, 0), (0, len(texts[0])), (1, 0)]):
        span = slice(start, start + len(texts[index]))
        ids[row, span], documents[row, span] = torch.tensor(texts[index]), 1 + index % 2
        positions[row, span] = torch.arange(len(texts[index]))
        mask[row, start + len(PROMPTS[index]) : span.stop] = True
    return TrainingBatch(ids, documents, positions, mask)


def decoded(target, drafter, texts) -> tuple[int, int]:
    committed = passes = 0
    for prompt, text, count in zip(PROMPTS, texts, NEW):
        out = target.generate(
            torch.tensor([prompt]),
            assistant_model=drafter(text),
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
        )
        assert out.sequences[0].tolist() == text
        committed, passes = committed + out.speculation.tokens[0] - 1, passes + out.speculation.rounds[0]
    return committed, passes


def right_after(length: int) -> int:
    """How many tokens the scripted drafter gets right after a text of this length."""
    return (length * 7) % (S + 1)


class ByLength(ScriptedDrafter):
    def start(self, view, batch):
        return ByLengthSession(self, batch)


class ByLengthSession(ScriptedSession):
    def propose(self, context):
        self.rounds = [len(text) for text in self.texts]
        return super().propose(context)


def test_simulated_decoding_is_what_a_scripted_drafter_gives(target):
    texts = answers(target, PROMPTS, NEW)
    batch = packed(texts)
    anchors = batch.loss_mask.flatten().nonzero().flatten()
    lengths = batch.position_ids.flatten()[anchors] + 1
    matches = torch.arange(S) < torch.tensor([right_after(n) for n in lengths.tolist()])[:, None]
    order = torch.randperm(len(anchors))
    walked = simulate(matches[order], anchors[order], batch)
    assert walked == decoded(target, lambda text: ByLength([text], [right_after], S), texts)
    assert 1 < simulated_tau(matches, anchors, batch) < S + 1


@pytest.mark.parametrize("draft_ids", [None, IDS])
def test_tau_in_training_is_tau_in_decoding(target, view, draft_ids):
    """A drafter that has learnt the texts in part, through DraftLoss."""
    texts = answers(target, PROMPTS, NEW)
    batch, drafter = packed(texts), make_drafter(draft_ids=draft_ids)
    loss = DraftLoss("ce", "decay", chunk_size=16)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=0.02)
    taus = []
    for _ in range(15):
        out = loss(drafter, view, batch)
        out["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        taus.append(simulated_tau(out["matches"], out["anchors"], batch))
    out = loss(drafter, view, batch)
    committed, passes = simulate(out["matches"], out["anchors"], batch)
    assert (committed, passes) == decoded(target, lambda text: drafter, texts)
    assert taus[0] < committed / passes < S + 1


def walk(matches: list[list[bool]], mask: list[bool]) -> tuple[int, int]:
    """One answer, one token at a time. matches by column."""
    columns = [c for c, inside in enumerate(mask) if inside]
    at, committed, passes = columns[0], 0, 0
    while at < columns[-1]:
        passes += 1
        for k in range(S + 1):
            at, committed = at + 1, committed + 1
            if at == columns[-1] or k == S or not matches[at - 1 - k][k]:
                break
    return committed, passes


def test_simulated_decoding_against_a_walk_token_by_token():
    for _ in range(20):
        start, length = torch.randint(0, 5, (1,)).item(), torch.randint(1, 30, (1,)).item()
        mask = [start <= c < start + length for c in range(40)]
        matches = torch.rand(40, S) < 0.7
        batch = TrainingBatch(*(torch.zeros(1, 40, dtype=torch.long) for _ in range(3)), torch.tensor([mask]))
        anchors = torch.arange(40)[mask]
        assert simulate(matches[anchors], anchors, batch) == walk(matches.tolist(), mask)


def test_a_walk_goes_on_at_the_next_anchor_of_its_answer():
    mask = torch.tensor([[False, True, True, True, True, True, True, True]])
    batch = TrainingBatch(*(torch.zeros(1, 8, dtype=torch.long) for _ in range(3)), mask)
    # Column 1 is no anchor: 2 commits 3, 4; then 5 (4 is none) commits 6 and the last, 7.
    matches = torch.tensor([[True, False], [True, True]])
    assert simulate(matches, torch.tensor([2, 5]), batch) == (4, 2)
    assert simulate(matches[:0], torch.zeros(0, dtype=torch.long), batch) == (0, 0)
    assert simulated_tau(matches[:0], torch.zeros(0, dtype=torch.long), batch) == 1.0
