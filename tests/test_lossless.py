"""Greedy output equals plain generate token for token: every family, every kind of target, every batch, chain and tree.

Right text with nothing accepted would be a failure too, so the acceptance is asserted in every cell whose drafter is
scripted: an oracle needs ceil((n - 1) / (k + 1)) passes after the prefill (which gives the first token), an adversary
gets nothing accepted, a mixed drafter exactly what its script says.
"""

from __future__ import annotations

import copy
import itertools
import math
from functools import cache

import pytest
import torch
from conftest import ScriptedDrafter, adversary, mixed, oracle
from targets import LENGTHS, NEW_TOKENS, TARGETS, padded, plain, prompts, target

from hf_specdraft import families
from hf_specdraft import target as target_module
from hf_specdraft.cache import RowCache
from hf_specdraft.draft import Verdict
from hf_specdraft.drafters.assistant import AssistantDrafter
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.target import tree_form
from hf_specdraft.verifier import Verifier

K = 5
SCRIPTS = {"oracle": oracle(K), "adversary": adversary, "mixed": mixed(K)}
CELLS = [(name, attention) for name, tiny in TARGETS.items() for attention in tiny.attention]
FORMS = [
    pytest.param(name, attention, tree, id=f"{name}-{attention}-{'tree' if tree else 'chain'}")
    for name, attention in CELLS
    for tree in (False, True)
    if TARGETS[name].trees or not tree
]
# Families differ from scripted drafters in what they keep of a call, not in what the target's attention does: they meet
# its second implementation in slow runs only.
FAMILY_FORMS = [
    pytest.param(
        *form.values, id=form.id, marks=[pytest.mark.slow] * (form.values[1] != TARGETS[form.values[0]].attention[0])
    )
    for form in FORMS
]
BATCHES = [pytest.param(LENGTHS[2:3], id="batch1"), pytest.param(LENGTHS, id="batch4")]


@cache
def family_drafter(name: str, tree: bool):
    """The family's tiny drafter with random weights, for a target of hidden size 32 and 64 tokens."""
    family = families()[name]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = family.config_class.tiny(num_assistant_tokens=3, tree_nodes=6 if tree else 0, policy="fixed")
        return family(config).eval()


def scripted_counts(script, new_tokens: int = NEW_TOKENS, k: int = K) -> tuple[int, int]:
    """(rounds, accepted tokens) of one row. The last token is never drafted: the target gives it anyway."""
    done, rounds, accepted = 1, 0, 0
    while done < new_tokens:
        taken = min(script(rounds), k, new_tokens - done - 1)
        done, rounds, accepted = done + taken + 1, rounds + 1, accepted + taken
    return rounds, accepted


def assert_equals_plain(model, answers: list[list[int]], drafter, new_tokens: int = NEW_TOKENS, **inputs):
    """The drafter's greedy output is each row's own plain output behind its padding; returns the statistics."""
    rows = [answer[:-new_tokens] for answer in answers]
    out = model.generate(
        **{**padded(rows), **inputs},
        max_new_tokens=new_tokens,
        do_sample=False,
        assistant_model=drafter,
        return_dict_in_generate=True,
    )
    assert out.sequences.tolist() == padded(answers)["input_ids"].tolist()
    return out.speculation


def assert_scripted(model, answers, scripts, tree: bool, k: int = K, new_tokens: int = NEW_TOKENS, **inputs):
    """Equal to plain, and every row went through exactly the rounds its script makes."""
    drafter = ScriptedDrafter(answers, scripts, k, tree)
    stats = assert_equals_plain(model, answers, drafter, new_tokens, **inputs)
    counts = [scripted_counts(scripts[row % len(scripts)], new_tokens, k) for row in range(len(answers))]
    assert stats.rounds == [rounds for rounds, _ in counts]
    assert stats.accepted == sum(accepted for _, accepted in counts)
    return stats


# ---- the matrix ----


@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("name, attention, tree", FORMS)
def test_scripted_drafters(name, attention, tree, script, lengths):
    """Field cases 1, 11, 34: windows shorter than the text, sdpa and eager."""
    stats = assert_scripted(target(name, attention), plain(name, attention, lengths), [SCRIPTS[script]], tree)
    if script == "oracle":
        assert stats.rounds == [math.ceil((NEW_TOKENS - 1) / (K + 1))] * len(lengths)
    if script == "adversary":
        assert stats.accepted == 0


@pytest.mark.parametrize("name, attention, tree", FORMS)
def test_rows_of_one_batch_that_advance_unevenly(name, attention, tree):
    """Field case 11: a batch whose rows have different drafters."""
    scripts = [oracle(K), adversary, mixed(K), lambda r: (7 * r) % 4]
    assert_scripted(target(name, attention), plain(name, attention), scripts, tree)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen2_sliding"])
def test_every_node_has_the_logits_of_a_causal_pass_over_its_path(name, monkeypatch):
    """ddtree.md, check 3; the anchor's, behind each commit, are those of a fresh prefill. Both longer than a window."""
    model, answers = target(name), plain(name, None, LENGTHS[:2])
    passes, verify = [], Verifier.__call__

    def spy(self, draft, logits, active):
        passes.append((draft, logits.clone(), [(row, list(self.rows.new[row])) for row in active]))
        return verify(self, draft, logits, active)

    monkeypatch.setattr(Verifier, "__call__", spy)
    assert_scripted(model, answers, [mixed(K), lambda r: (7 * r) % 4], True)
    assert sum(not draft.is_chain for draft, *_ in passes) > 5
    for draft, logits, rows in passes:
        for b, (row, new) in enumerate(rows):
            if len(new) == NEW_TOKENS:
                continue
            committed = answers[row][:-NEW_TOKENS] + new
            paths = {-1: committed}
            for node in range(int(draft.valid[b].sum())):
                paths[node] = paths[int(draft.parents[b, node])] + [int(draft.tokens[b, node])]
            # Those of one length in one pass, each over its whole text.
            for length in {len(path) for path in paths.values()}:
                some = [node for node, path in paths.items() if len(path) == length]
                alone = model(torch.tensor([paths[node] for node in some])).logits[:, -1]
                torch.testing.assert_close(logits[b, [node + 1 for node in some]], alone, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("family", sorted(families()))
@pytest.mark.parametrize("name, attention, tree", FAMILY_FORMS)
def test_families(name, attention, tree, family, lengths):
    stats = assert_equals_plain(target(name, attention), plain(name, attention, lengths), family_drafter(family, tree))
    assert stats.verified > 0


# Parts of a block drafter, by the fields that name them.
PARTS = {
    "markov": dict(corrector={"name": "markov", "rank": 4}, confidence={"with_markov": True}),
    "rnn": dict(corrector={"name": "markov", "rank": 4, "kind": "rnn"}, anchor_drafts=True),
    "gru": dict(corrector={"name": "gru", "rank": 4, "hidden_size": 4}),
}


@pytest.mark.parametrize(
    "name, parts",
    [
        # Parts never meet the target: one goes over all of them, the others do in slow runs.
        pytest.param(name, parts, marks=[pytest.mark.slow] * (parts != "markov" and name not in ("llama", "gemma2")))
        for name in TARGETS
        for parts in PARTS
    ],
)
def test_block_drafters_with_parts(name, parts):
    """Ragged rows. The parts' weights are random, so that they act."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drafter = BlockDrafter(BlockConfig.tiny(policy="fixed", **PARTS[parts])).eval()
        for module in (drafter.corrector, drafter.confidence):
            for tensor in () if module is None else module.parameters():
                torch.nn.init.normal_(tensor)
    assert assert_equals_plain(target(name), plain(name), drafter).verified > 0


@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize("name", TARGETS)
def test_a_copy_of_the_target_is_always_right(name, lengths):
    """Field case 4: anything below 100 % is a fault in the positions or the cache of either side."""
    model = target(name)
    drafter = AssistantDrafter.from_model(copy.deepcopy(model), policy="fixed", num_assistant_tokens=K)
    stats = assert_equals_plain(model, plain(name, None, lengths), drafter)
    assert stats.acceptance == 1
    assert stats.rounds == [math.ceil((NEW_TOKENS - 1) / (K + 1))] * len(lengths)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_float64(tree):
    model = copy.deepcopy(target("llama")).double()
    texts = [model.generate(torch.tensor([row]), max_new_tokens=NEW_TOKENS, do_sample=False) for row in prompts()]
    answers = [text[0].tolist() for text in texts]
    assert_scripted(model, answers, [SCRIPTS["mixed"]], tree)
    assert_equals_plain(model, answers, BlockDrafter(BlockConfig.tiny(policy="fixed", tree_nodes=6 * tree)).eval())


# ---- the matrix means what it says ----


@pytest.mark.parametrize("name, attention", CELLS)
def test_targets_are_worth_testing_on(name, attention):
    """Texts that vary, on the attention and in the form (chain or tree) the table promises."""
    model = target(name, attention)
    assert model.config._attn_implementation == attention
    assert (tree_form(model) is not None) == TARGETS[name].trees
    for answer in plain(name, attention):
        assert len(set(answer[-NEW_TOKENS:])) >= 6


# ---- shapes of drafts ----


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_every_draft_length_gives_the_same_text(tree, k):
    """Field case 3. In the scripted tree the right branch stands behind two wrong ones."""
    assert_scripted(target("llama"), plain("llama"), [mixed(k), oracle(k), adversary, mixed(k)], tree, k)


def test_forced_counts_in_rows_of_equal_length():
    """Field case 12: eight rows, accepted counts 0, 1, 2, 3, 4, 5, 0, 5 in each of six rounds."""
    counts = (0, 1, 2, 3, 4, 5, 0, 5)
    lengths, new_tokens = (8,) * len(counts), 1 + 6 * 6 + 1
    model = target("llama")
    inputs = padded(prompts(lengths, seed=3))
    answers = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False).tolist()
    assert [row[:8] for row in answers] == inputs["input_ids"].tolist()
    for tree in (False, True):
        stats = assert_scripted(model, answers, [lambda r, c=c: c for c in counts], tree, new_tokens=new_tokens)
        assert stats.rounds == [37, 19, 13, 10, 8, 7, 37, 7]


@pytest.mark.parametrize("drafter", ["scripted", *sorted(families()), "copy"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_padding_changes_neither_text_nor_drafts(name, drafter):
    """Field case 14: one row behind 0 to 9 pad tokens. The drafter's positions come from the mask, so it must draft the
    same tokens too."""
    model, answers = target(name), plain(name, None, LENGTHS[2:3])
    prompt = answers[0][:-NEW_TOKENS]
    if drafter == "scripted":
        made = ScriptedDrafter(answers, [mixed(K)], K)
    elif drafter == "copy":
        made = AssistantDrafter.from_model(copy.deepcopy(model), policy="fixed")
    else:
        made = family_drafter(drafter, False)
    seen = []
    for pad in range(10):
        drafts = []
        inputs = {
            "input_ids": torch.tensor([[0] * pad + prompt]),
            "attention_mask": torch.tensor([[0] * pad + [1] * len(prompt)]),
        }
        out = model.generate(
            **inputs,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            assistant_model=listening(made, drafts),
            return_dict_in_generate=True,
        )
        assert out.sequences[0, pad:].tolist() == answers[0]
        seen.append((drafts, out.speculation.rounds, out.speculation.accepted))
    assert drafts and all(one == seen[0] for one in seen)


def listening(drafter, heard: list):
    """The drafter, whose every draft's tokens are also appended to `heard`."""
    other = copy.copy(drafter)

    def start(view, batch):
        session = drafter.start(view, batch)
        propose = session.propose

        def and_tell(context):
            draft = propose(context)
            heard.append(draft.tokens[draft.valid].tolist())
            return draft

        session.propose = and_tell
        return session

    other.start = start
    return other


@pytest.mark.parametrize("mask", ["omitted", "ones", "zeros"])
def test_masks_omitted_or_all_ones(mask):
    """generate drops an all-ones mask; a batch without padding must not miss it (field case 42)."""
    lengths = (8, 8) if mask != "zeros" else (8, 5)
    inputs = {"attention_mask": None} if mask == "omitted" else {}
    assert_scripted(target("llama"), plain("llama", None, lengths), [mixed(K), oracle(K)], True, **inputs)


# ---- broken on purpose: the checks above must notice ----


def skip_realignment(monkeypatch):
    """Rows keep the columns they had: the shorter rows' rejected tokens stay among their context."""

    def no_gather(self, total, index, rows):
        self.cache.crop(index.shape[1] - total)

    monkeypatch.setattr(RowCache, "_gather", no_gather)


def keep_wrong_columns(monkeypatch):
    """Off by one: the column behind each accepted one is kept."""
    commit = RowCache.commit

    def shifted(self, width, kept, rows=None):
        return commit(self, width, [[min(c + 1, width - 1) for c in columns] for columns in kept], rows)

    monkeypatch.setattr(RowCache, "commit", shifted)


def forget_one_column(monkeypatch):
    """Off by one: the last accepted token's column is dropped, as if the anchor had been fed."""
    commit = RowCache.commit

    def shortened(self, width, kept, rows=None):
        return commit(self, width, [columns[:-1] or columns for columns in kept], rows)

    monkeypatch.setattr(RowCache, "commit", shortened)


def ignore_rejections(monkeypatch):
    """Every drafted token passes (field case 8)."""
    verify = Verifier.__call__

    def accept_all(self, draft, logits, active):
        verdict = verify(self, draft, logits, active)
        path = torch.arange(draft.shape[1]).where(draft.valid, -1)
        return Verdict(path, draft.valid.sum(1), verdict.next_token)

    monkeypatch.setattr(Verifier, "__call__", accept_all)


@pytest.mark.parametrize("fault", [skip_realignment, keep_wrong_columns, forget_one_column, ignore_rejections])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_faults_are_noticed(monkeypatch, fault, name):
    scripts = [oracle(K), adversary, mixed(K), lambda r: (7 * r) % 4]
    model, answers = target(name), plain(name)
    assert_scripted(model, answers, scripts, False)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        assert_scripted(model, answers, scripts, False)


def test_trees_that_see_other_branches_are_noticed(monkeypatch):
    """A node that attends to nodes off its path."""

    def everything(lineage):
        batch, nodes = lineage.shape[:2]
        return torch.ones(batch, nodes + 1, nodes + 1).tril().bool()

    model, answers = target("llama"), plain("llama")
    assert tree_form(model) == "tensor"  # probed before the fault
    monkeypatch.setattr(target_module, "visibility", everything)
    with pytest.raises(AssertionError):
        assert_scripted(model, answers, [oracle(K)], True)


def test_scripted_counts_are_those_of_the_formula():
    for k, n in itertools.product(range(1, 8), range(2, 40)):
        assert scripted_counts(oracle(k), n, k)[0] == math.ceil((n - 1) / (k + 1))
        assert scripted_counts(adversary, n, k) == (n - 1, 0)
