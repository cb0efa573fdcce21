"""The vocabulary side of a drafter: trimmed and low-rank heads change how much is accepted, never what comes out."""

import pytest
import torch
from conftest import tiny_llama
from test_sampling_law import PROMPT, TOKENS, V, assert_fits, assert_misfits, draw, exact_law, p_value, target

from hf_specdraft.draft import Draft, Law
from hf_specdraft.drafters import AutoDrafter, Session, TargetView
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.heads import HeadConfig, HeadedDrafter, LowRankHead, read_vocabulary_map, vocabulary_map
from hf_specdraft.training.vocabulary import trim
from hf_specdraft.verification import argmax, sample

ABSURD = [1, 4]


class BigramConfig(HeadConfig):
    model_type = "specdraft_bigram"
    policy: str = "fixed"
    own_head: bool = True
    hidden_size: int = V


class Bigram(HeadedDrafter):
    """One token after another, each from what the target says after the token before it alone: its hidden state is
    that token, one-hot, and its head a table."""

    config_class = BigramConfig
    is_sequential = True

    def __init__(self, config):
        super().__init__(config)
        self.add_head()
        self.post_init()

    def start(self, view, batch):
        return BigramSession(self, view)


class BigramSession(Session):
    def __init__(self, drafter, view):
        self.drafter, self.view = drafter, view

    def observe(self, commit):
        pass

    def keep(self, rows):
        pass

    @torch.no_grad()
    def propose(self, context):
        drafter, last, steps, laws = self.drafter, context.anchor[:, None], [], []
        for _ in range(min(max(context.lengths), drafter.config.num_assistant_tokens)):
            hidden = torch.nn.functional.one_hot(last, drafter.config.hidden_size).to(drafter.dtype)
            logits = drafter.logits(self.view, hidden)
            if context.do_sample:
                last, law = drafter.draw(self.view, logits, context)
                laws.append(law)
            else:
                last = drafter.target_ids(argmax(logits))
            steps.append(last)
        law = Law(*_joined(laws), laws[0].rows) if laws else None
        lengths = [min(length, len(steps)) for length in context.lengths]
        return Draft.chain(torch.cat(steps, 1), lengths, law=law)


def _joined(laws):
    ids = None if laws[0].ids is None else torch.cat([law.ids for law in laws], 1)
    return torch.cat([law.probs for law in laws], 1), ids


def bigram(ids=None, rank=None):
    drafter = Bigram(BigramConfig(vocab_size=V, num_assistant_tokens=3))
    prefixes = torch.tensor([[*PROMPT, token] for token in range(V)])
    with torch.no_grad():
        drafter.lm_head.weight.copy_(target()(prefixes).logits[:, -1].T)
    return drafter if ids is None else trim(drafter, torch.tensor(ids))


def block(**fields):
    torch.manual_seed(0)
    own = dict(own_head=False, draft_vocab_size=None)
    return BlockDrafter(BlockConfig.tiny(policy="fixed", initializer_range=0.2, **{**own, **fields})).eval()


def generate(model, drafter, **settings):
    prompt = torch.tensor([[3, 7, 11, 5, 2]])
    return model.generate(
        prompt, max_new_tokens=24, do_sample=False, assistant_model=drafter, return_dict_in_generate=True, **settings
    )


# ---- trimmed ----


@pytest.mark.parametrize("tree_nodes", [0, 10])
def test_all_rows_kept_give_identical_drafts(tree_nodes):
    model = tiny_llama()
    borrowed = block(tree_nodes=tree_nodes)
    copied = trim(borrowed, torch.arange(64), TargetView(model))
    assert copied.config.own_head and copied.draft_token_ids.tolist() == list(range(64))
    ours, theirs = (generate(model, drafter) for drafter in (copied, borrowed))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert (ours.speculation.verified, ours.speculation.accepted) == (
        theirs.speculation.verified,
        theirs.speculation.accepted,
    )
    hidden = torch.randn(2, 3, 32)
    view = TargetView(model)
    torch.testing.assert_close(copied.logits(view, hidden), borrowed.logits(view, hidden), atol=1e-5, rtol=0)


def test_greedy_text_survives_an_absurd_vocabulary():
    prompt = torch.tensor([PROMPT])
    settings = dict(max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
    plain = target().generate(prompt, **settings)
    whole, absurd = (target().generate(prompt, assistant_model=bigram(ids), **settings) for ids in (None, [0, 4]))
    assert torch.equal(whole.sequences, plain.sequences) and torch.equal(absurd.sequences, plain.sequences)
    assert absurd.speculation.accepted < whole.speculation.accepted


def test_sampled_law_survives_an_absurd_vocabulary():
    assert_fits(bigram(ABSURD), "all_warpers")


class Unrenormalised(Bigram):
    """Draws from ABSURD, and tells the probabilities that these tokens have in a softmax over the whole vocabulary."""

    def draw(self, view, logits, context):
        ids = torch.tensor(ABSURD)
        probs = context.warp(logits).softmax(-1)[..., ids]
        drawn = sample(probs / probs.sum(-1, keepdim=True), torch.rand(probs.shape[:-1]))
        return ids[drawn], Law(probs, ids.expand_as(probs), torch.ones(len(probs), dtype=torch.bool))


def test_a_law_told_without_renormalising_is_noticed(monkeypatch):
    drafter = bigram()
    drafter.__class__ = Unrenormalised
    # The verifier takes such a law for none: nothing is accepted and the text stays exact.
    out = draw(drafter, "temperature")
    assert out.speculation.accepted == 0 and out.speculation.verified > 0
    assert p_value(out.sequences[:, len(PROMPT) :][:, :TOKENS], exact_law("temperature")) > 1e-4
    # Taken at its word, it spoils the law.
    monkeypatch.setattr(Law, "checked", lambda law: law)
    assert_misfits(drafter, "temperature")


def test_maps_make_the_round_trip():
    ids = torch.tensor([0, 3, 4, 9])
    maps = vocabulary_map(ids, 12)
    assert torch.equal(torch.arange(4) + maps["d2t"], ids) and torch.equal(maps["t2d"].nonzero().flatten(), ids)
    assert maps["d2t"].dtype == torch.int64 and maps["t2d"].dtype == torch.bool and len(maps["t2d"]) == 12
    state = dict(maps)
    assert read_vocabulary_map(state, 4, 12) and set(state) == {"draft_ids"}
    assert torch.equal(state["draft_ids"], ids)
    assert not read_vocabulary_map({}, 4, 12)


def test_rows_out_of_order_are_put_in_order():
    ids, weight = torch.tensor([9, 0, 4, 3]), torch.randn(4, 5)
    state = {
        "d2t": ids - torch.arange(4),
        "t2d": torch.zeros(12).index_fill(0, ids, 1).bool(),
        "lm_head.weight": weight,
    }
    assert read_vocabulary_map(state, 4, 12)
    assert state["draft_ids"].tolist() == [0, 3, 4, 9]
    assert torch.equal(state["lm_head.weight"], weight[[1, 3, 2, 0]])


@pytest.mark.parametrize(
    ("ids", "marked", "message"),
    [
        ([0, 3, 3, 9], [0, 3, 9], "distinct"),
        ([0, 3, 4, 12], None, "below 12"),
        ([0, 3, 4], None, "4 head rows"),
        ([0, 3, 4, 9], [0, 3, 4, 8], "different tokens"),
    ],
)
def test_broken_maps(ids, marked, message):
    state = {"d2t": torch.tensor(ids) - torch.arange(len(ids))}
    if marked:
        state["t2d"] = torch.zeros(12).index_fill(0, torch.tensor(marked), 1).bool()
    with pytest.raises(ValueError, match=message):
        read_vocabulary_map(state, 4, 12)


def test_spread_puts_each_row_at_its_token():
    drafter, view = bigram(ABSURD), TargetView(target())
    q = drafter.spread(view, torch.tensor([[0.25, 0.75]]), fill=0)
    assert q.tolist() == [[0, 0.25, 0, 0, 0.75, 0]]
    whole = bigram()
    assert torch.equal(whole.spread(view, q, fill=0), q)


# ---- low rank ----


@pytest.mark.parametrize("trimmed", [None, 48])
def test_a_low_rank_head_has_the_rank_and_the_size_it_says(trimmed, tmp_path):
    rank, rows = 8, trimmed or 64
    drafter = block(own_head=True, draft_head_rank=rank, draft_vocab_size=trimmed)
    head = drafter.lm_head
    assert sum(weight.numel() for weight in head.parameters()) == rank * (rows + 32)
    assert torch.linalg.matrix_rank(head.up.weight @ head.down.weight) <= rank
    assert drafter.get_output_embeddings() is None
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    hidden, view = torch.randn(2, 3, 32), TargetView(tiny_llama())
    assert loaded.logits(view, hidden).shape == (2, 3, rows)
    assert torch.equal(loaded.logits(view, hidden), drafter.logits(view, hidden))
    names = {name for name in drafter.state_dict() if name.startswith(("lm_head", "draft_ids"))}
    assert names == {"lm_head.down.weight", "lm_head.up.weight"} | ({"draft_ids"} if trimmed else set())


def test_a_low_rank_head_starts_with_logits_of_unit_variance():
    torch.manual_seed(0)
    config = BlockConfig.tiny(hidden_size=256, vocab_size=2000, draft_head_rank=32, draft_vocab_size=None)
    logits = BlockDrafter(config).lm_head(torch.randn(500, 256))
    assert 0.8 < logits.var() < 1.2


@pytest.mark.parametrize("fields", [dict(draft_head_rank=4), dict(draft_head_rank=4, draft_vocab_size=20)])
@pytest.mark.parametrize("tree_nodes", [0, 10])
def test_greedy_text_with_low_rank_heads(fields, tree_nodes):
    model = tiny_llama()
    plain = generate(model, None)
    out = generate(model, block(own_head=True, tree_nodes=tree_nodes, **fields))
    assert torch.equal(out.sequences, plain.sequences) and out.speculation.verified > 0


# ---- what makes no head ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(own_head=False, draft_head_rank=4), "draft_head_rank"),
        (dict(own_head=False, draft_vocab_size=4), "draft_vocab_size"),
        (dict(own_head=True, draft_head_rank=0), "draft_head_rank must be at least 1"),
        (dict(own_head=True, draft_vocab_size=0), "draft_vocab_size must be at least 1"),
        (dict(own_head=True, draft_vocab_size=65), "more than the target's vocabulary of 64"),
        (dict(own_head=True, vocab_size=None), "vocab_size"),
    ],
)
def test_configs_that_make_no_head(fields, message):
    with pytest.raises(ValueError, match=message):
        BigramConfig(**{"vocab_size": 64, **fields})


def test_targets_a_head_cannot_serve():
    view = TargetView(tiny_llama())
    with pytest.raises(ValueError, match="borrows the head of a target of hidden_size 32"):
        Bigram(BigramConfig(vocab_size=64, own_head=False, hidden_size=16)).check(view)
    drafter = Bigram(BigramConfig(vocab_size=64, draft_vocab_size=2))
    drafter.draft_ids.copy_(torch.tensor([1, 64]))
    with pytest.raises(ValueError, match="proposes token 64"):
        drafter.check(view)
    assert isinstance(Bigram(BigramConfig(vocab_size=64, draft_head_rank=2)).lm_head, LowRankHead)
