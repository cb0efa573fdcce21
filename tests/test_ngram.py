"""The ngram family: its counts against SuffixDecoding and brute force, its session's contract, its gain over lookup."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModel
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

import hf_specdraft  # noqa: F401
from hf_specdraft import trees
from hf_specdraft.draft import Commit, Context
from hf_specdraft.drafters import AutoDrafter, TargetView
from hf_specdraft.drafters.ngram import NgramConfig, NgramDrafter, SharedPool, matcher
from hf_specdraft.drafters.ngram.matcher import SEPARATOR, Text
from hf_specdraft.policies import Threshold

STREAM = Path(__file__).parent / "fixtures" / "suffix" / "stream.json"


def context_of(session, lengths, nodes=None, tree=False, **fields) -> Context:
    anchors = [int(text.ids[-1]) if len(text.ids) > 1 else 0 for text in session.texts]
    positions = [len(text.ids) - 2 for text in session.texts]
    return Context(torch.tensor(anchors), positions, lengths, nodes or max(lengths), tree, **fields)


def session_of(*texts, pool=None, corpus=(), **config):
    drafter = NgramDrafter(NgramConfig(**config))
    drafter.pool = pool
    drafter.set_corpus(corpus)
    session = drafter.start(None, len(texts))
    session.observe(Commit([list(text) for text in texts]))
    return session


def drafted(draft, row=0) -> list[int]:
    return draft.tokens[row][draft.valid[row]].tolist()


def occurrences_of(needle: list[int], texts: list[list[int]]) -> int:
    return sum(text[i : i + len(needle)] == needle for text in texts for i in range(len(text) - len(needle) + 1))


# Counts


class Replay:
    """The golden stream's cache, one request after another."""

    def __init__(self, cached: int):
        self.pool = SharedPool(cached)
        self.own: dict[str, Text] = {}
        self.keys: dict[str, int] = {}

    def start_request(self, request, prompt):
        self.own[request] = Text(prompt)
        self.keys[request] = self.pool.start()

    def add_active_response(self, request, tokens):
        self.own[request].extend(tokens)
        self.pool.extend(self.keys[request], tokens)

    def stop_request(self, request):
        del self.own[request]

    def evict_cached_response(self, request):
        self.pool.remove(self.keys[request])

    def state(self, active, cached):
        assert sorted(self.own) == active
        assert sorted(r for r, key in self.keys.items() if key in self.pool._responses) == cached


def test_golden_stream_of_suffix_decoding():
    stream = json.loads(STREAM.read_text())
    replay, compared, ties = Replay(stream["max_cached_requests"]), 0, 0
    for step in stream["steps"]:
        operation = step.pop("op")
        if operation != "speculate":
            getattr(replay, operation)(**step)
            continue
        args, want, tied = step["args"], step["result"], step["tied_from"]
        tree, budget = args.get("use_tree_spec", False), args["max_spec_tokens"]
        own, pool = replay.own[step["request"]].ids, replay.pool.ids
        got = matcher.suffix(
            [own, pool],
            np.array(step["context"]),
            nodes=budget,
            depth=budget,
            tree=tree,
            min_prob=args.get("min_token_prob", 0.1),
            longest=stream["max_tree_depth"],
            factor=args.get("max_spec_factor", 1.0),
            offset=args.get("max_spec_offset", 0.0),
        )
        compared += 1
        brute_force(got, step["context"], [own, pool])
        if tree or tied is None:
            assert got.match == want["match_len"]
            assert got.score == pytest.approx(want["score"], abs=1e-5)
            np.testing.assert_allclose(sorted(got.probs), sorted(want["probs"]), atol=1e-5)
        if not tree and tied is None:
            assert (got.tokens, got.parents) == (want["token_ids"], want["parents"])
        if tied is not None:
            # What comes after a tie depends on its choice, and so may the score and the winning match.
            ties += 1
            if got.match == want["match_len"] and got.score == pytest.approx(want["score"], abs=1e-5):
                assert got.tokens[:tied] == want["token_ids"][:tied]
                np.testing.assert_allclose(got.probs[: tied + 1], want["probs"][: tied + 1], atol=1e-5)
    assert (compared, ties) == (276, 25)


def brute_force(got: matcher.Growth, context: list[int], sources: list[np.ndarray]) -> None:
    """Every probability is a ratio of occurrences in one of the sources."""
    matched = context[len(context) - got.match :]

    def right(source: np.ndarray) -> bool:
        texts = [list(map(int, text.split())) for text in " ".join(map(str, source.tolist())).split(str(SEPARATOR))]
        path, expected = {-1: []}, {-1: 1.0}
        for node, (token, parent) in enumerate(zip(got.tokens, got.parents)):
            before = matched + path[parent]
            path[node] = path[parent] + [token]
            expected[node] = (
                expected[parent] * occurrences_of(before + [token], texts) / max(1, occurrences_of(before, texts))
            )
        return np.allclose([expected[node] for node in range(len(got.tokens))], got.probs, atol=1e-6)

    assert any(right(source) for source in sources)


def test_suffix_decoding_by_hand():
    text = Text([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]).ids
    deep = matcher.suffix([text], text[1:], nodes=8, depth=8, longest=64)
    assert (deep.match, deep.tokens, deep.probs, deep.score) == (5, [4, 1, 2, 3, 1], [0.5] * 5, 2.5)
    shallow = matcher.suffix([text], text[1:], nodes=8, depth=8, longest=8)
    assert (shallow.match, shallow.tokens, shallow.score) == (4, [4, 1, 2, 3], 2.0)


@pytest.mark.parametrize("seed", range(40))
def test_matches_equal_brute_force(seed):
    rng = random.Random(seed)
    texts = [[rng.randrange(3) for _ in range(rng.randrange(1, 60))] for _ in range(3)]
    context = np.array([rng.randrange(3) for _ in range(rng.randrange(1, 12))])
    joined = np.concatenate([Text(text).ids for text in texts])
    positions, lengths, agreeing = matcher.occurrences(joined, context, longest=20, limit=10**6)
    want, alike = {}, []
    for end in range(len(joined) + 1):
        length = 0
        while length < min(end, len(context)) and joined[end - 1 - length] == context[-1 - length]:
            length += 1
        if length:
            want[end] = length
            alike.append(sum(joined[end - 1 - i] == context[-1 - i] for i in range(min(end, len(context)))))
    assert dict(zip(positions.tolist(), lengths.tolist())) == want
    assert agreeing.tolist() == alike


def test_the_longest_match_survives_the_limit():
    rng = random.Random(0)
    phrase = [5, 6, 7, 8, 9, 1]
    text = phrase + [2] + [rng.choice([1, 3]) for _ in range(3000)]
    positions, lengths, agreeing = matcher.occurrences(
        np.array([SEPARATOR, *text]), np.array(phrase), longest=32, limit=16
    )
    assert (positions[0], lengths[0]) == (1 + len(phrase), len(phrase))
    assert len(positions) <= 32


@pytest.mark.parametrize("tree", [False, True])
def test_a_separator_is_never_crossed(tree):
    shared = np.concatenate([Text([1, 2, 3]).ids, Text([4, 5]).ids])
    found = matcher.blend([Text([9, 2]).ids, shared], np.array([9, 2]), nodes=6, depth=6, tree=tree, recent=0)
    assert found.tokens == [3]
    across = matcher.blend([Text([3]).ids, shared], np.array([3]), nodes=6, depth=6, tree=tree, recent=0)
    assert across.tokens == []


def test_growth_is_best_first_and_a_tree():
    paths, weights = [(1, 2), (1, 3), (4,)], [1.0, 2.0, 3.0]
    found = matcher.grow(paths, weights, [1, 1, 1], nodes=10, tree=True)
    assert found.tokens == [1, 4, 3, 2] and found.parents == [-1, -1, 0, 0]
    assert found.probs == pytest.approx([1 / 2, 1 / 2, 1 / 3, 1 / 6])
    # Equals: the earlier path's child is the chain's.
    assert matcher.grow(paths, weights, [1, 1, 1], nodes=10).tokens == [1, 3]
    assert matcher.grow(paths, weights, [1, 1, 1], nodes=10, tree=True, min_prob=0.4).tokens == [1, 4]
    # A longer match is trusted more, a match of one token with escape 1 in half of the cases.
    assert matcher.grow([(1, 2)], [1.0], [1], nodes=2, escape=1.0).probs == pytest.approx([1 / 2, 1 / 3])


# The session


def test_long_and_recent_matches_win():
    # Lookup by two tokens would copy what followed the first "1 2".
    for text in ([9, 1, 2, 3, 7, 8, 1, 2, 4, 8, 1, 2], [1, 2, 3, 1, 2, 4, 0, 1, 2]):
        session = session_of(text)
        assert lookup(text, 1) == [3] and drafted(session.propose(context_of(session, [1]))) == [4]


def test_a_loop_is_continued_past_the_end_of_the_text():
    session = session_of([4, 5, 6, 4, 5, 6, 4])
    assert drafted(session.propose(context_of(session, [8]))) == [5, 6, 4, 5, 6, 4, 5, 6]


def test_a_copy_goes_on_behind_a_replaced_token():
    session = session_of([1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 9], recent=0)
    assert drafted(session.propose(context_of(session, [3]))) == [5, 6, 7]
    suffix = session_of([1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 9], scoring="suffix")
    assert suffix.propose(context_of(suffix, [3])).shape[1] == 0
    # Of equal matches, the one that agrees beyond its first difference: 8 1 2 x 3, after 8 1 2 y 3.
    session = session_of([8, 1, 2, 6, 3, 4, 0, 3, 5, 0, 8, 1, 2, 7, 3], recent=0)
    assert drafted(session.propose(context_of(session, [1]))) == [4]


def test_without_a_match_frequent_tokens_are_guessed():
    session = session_of([3, 3, 3, 2, 2, 1, 7])
    draft = session.propose(context_of(session, [4], nodes=3, tree=True))
    assert drafted(draft) == [3, 2, 1] and draft.parents.tolist() == [[-1, -1, -1]]
    assert drafted(session.propose(context_of(session, [4]))) == [3]
    silent = session_of([3, 3, 3, 2, 2, 1, 7], recent=0)
    assert silent.propose(context_of(silent, [4])).shape[1] == 0


@pytest.mark.parametrize("scoring", ["blend", "suffix"])
@pytest.mark.parametrize("tree", [False, True])
def test_drafts_keep_the_contract(scoring, tree):
    rng = random.Random(1)
    rows = [[rng.randrange(4) for _ in range(n)] for n in (40, 1, 25, 60, 0)]
    lengths = [5, 3, 0, 2, 4]
    session = session_of(*rows, scoring=scoring, min_prob=0.01)
    draft = session.propose(context_of(session, lengths, nodes=9 if tree else 5, tree=tree))
    assert draft.law is None and draft.shape[1] <= 9
    assert draft.parents.device.type == draft.valid.device.type == "cpu"
    assert draft.is_chain == (not tree)
    depths = trees.depths(draft.parents, draft.valid)
    for row, length in enumerate(lengths):
        seen = set()
        for node in torch.nonzero(draft.valid[row])[:, 0].tolist():
            parent = int(draft.parents[row, node])
            assert parent < node and (parent < 0 or draft.valid[row, parent])
            assert depths[row, node] <= length
            # Siblings are distinct.
            assert (parent, int(draft.tokens[row, node])) not in seen
            seen.add((parent, int(draft.tokens[row, node])))
            if parent >= 0:
                assert draft.confidence[row, node] <= draft.confidence[row, parent]
    assert not draft.valid[2].any() and not draft.valid[4].any()
    assert draft.valid[0].any()
    # Asking again changes nothing.
    again = session.propose(context_of(session, lengths, nodes=9 if tree else 5, tree=tree))
    assert torch.equal(again.tokens, draft.tokens) and torch.equal(again.valid, draft.valid)


def test_trees_only_where_both_sides_want_them():
    text = [1, 2, 1, 3, 1, 2, 1]
    wanting, chains = session_of(text, tree_nodes=6), session_of(text, tree_nodes=0)
    assert not wanting.propose(context_of(wanting, [3], nodes=6, tree=True)).is_chain
    assert wanting.propose(context_of(wanting, [3], nodes=6, tree=False)).is_chain
    assert chains.propose(context_of(chains, [3], nodes=6, tree=True)).is_chain


def test_a_confidence_threshold_cuts():
    session = session_of([1, 2, 3, 4, 1, 2])
    all_of_it = session.propose(context_of(session, [4]))
    cut = Threshold(float(all_of_it.confidence[0, 1]) - 1e-6).cut(all_of_it, [True])
    assert drafted(all_of_it) == [3, 4, 1, 2] and drafted(cut) == [3, 4]


def test_rows_are_independent_and_may_leave():
    rng = random.Random(2)
    rows = [[rng.randrange(5) for _ in range(30 + 7 * i)] for i in range(4)]
    batch = session_of(*rows)
    alone = [session_of(row) for row in rows]
    # Indices into the rows that are left, and which rows of the start these are.
    for keep, kept in (([0, 1, 2, 3], [0, 1, 2, 3]), ([3, 0], [3, 0]), ([1], [0])):
        batch.keep(keep)
        alone_kept = [alone[i] for i in kept]
        news = [[rng.randrange(5) for _ in range(2)] for _ in kept]
        batch.observe(Commit(news))
        for session, new in zip(alone_kept, news):
            session.observe(Commit([new]))
        together = batch.propose(context_of(batch, [4] * len(kept)))
        for row, session in enumerate(alone_kept):
            assert drafted(together, row) == drafted(session.propose(context_of(session, [4])))


def test_the_prompt_may_be_missing():
    session = session_of([])
    assert session.propose(context_of(session, [3])).shape[1] == 0
    session.observe(Commit([[6, 7, 6]]))
    assert drafted(session.propose(context_of(session, [3]))) == [7, 6, 7]


# The module


@pytest.mark.parametrize("corpus", [(), ([1, 2, 3], [4, 5])])
def test_saved_and_loaded_like_any_model(tmp_path, corpus):
    drafter = NgramDrafter(NgramConfig.tiny(escape=2.5))
    drafter.set_corpus(corpus)
    drafter.save_pretrained(tmp_path)
    files = {"config.json", "model.safetensors", "modeling_specdraft.py", "README.md"}
    assert {file.name for file in tmp_path.iterdir()} == files
    assert AutoConfig.from_pretrained(tmp_path).escape == 2.5
    for loader in (AutoModel, AutoDrafter, NgramDrafter):
        loaded = loader.from_pretrained(tmp_path, dtype=torch.bfloat16).to("cpu")
        assert type(loaded) is NgramDrafter and loaded.device.type == "cpu" and loaded.dtype.is_floating_point
        assert loaded.corpus.dtype == torch.int32 and torch.equal(loaded.corpus, drafter.corpus)


def test_a_call_leaves_nothing_in_the_module():
    drafter = NgramDrafter(NgramConfig.tiny())
    before = {name: repr(value) for name, value in vars(drafter).items()}
    session = drafter.start(None, 1)
    session.observe(Commit([[1, 2, 1, 2, 1]]))
    session.propose(context_of(session, [3]))
    assert {name: repr(value) for name, value in vars(drafter).items()} == before


def test_corpus_files(tmp_path):
    np.save(tmp_path / "rows.npy", np.array([[1, 2, 3], [4, 5, 6]]))
    save_file({"b": np.array([9, 9]), "a": np.array([7, 8])}, tmp_path / "named.safetensors")
    drafter = NgramDrafter(NgramConfig(vocab_size=32, recent=0))
    drafter.set_corpus([tmp_path / "rows.npy", str(tmp_path / "named.safetensors"), [10, 11]])
    assert drafter.corpus.tolist() == [-1, 1, 2, 3, -1, 4, 5, 6, -1, 7, 8, -1, 9, 9, -1, 10, 11]
    assert drafter.config.corpus_size == 17
    session = drafter.start(None, 1)
    session.observe(Commit([[30, 4]]))
    assert drafted(session.propose(context_of(session, [4]))) == [5, 6]
    suffix = session_of([30, 4, 5], corpus=[[4, 5, 6, 7]], scoring="suffix")
    assert drafted(suffix.propose(context_of(suffix, [4]))) == [6, 7]


@pytest.mark.parametrize("text", [[0.5], [-1, 2], [40]])
def test_a_corpus_holds_token_ids(text):
    with pytest.raises(ValueError, match="token ids from 0 to 31"):
        NgramDrafter(NgramConfig(vocab_size=32)).set_corpus([text])


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path):
    drafter = NgramDrafter(NgramConfig())
    drafter.set_corpus([[1, 70]])
    with pytest.raises(ValueError, match="corpus holds token 70"):
        drafter.check(TargetView(tiny_llama(vocab=64)))
    with pytest.raises(ValueError, match="npy or .safetensors"):
        drafter.set_corpus([tmp_path / "corpus.txt"])


def test_a_pool_remembers_responses_only_and_only_when_given():
    pool = SharedPool(max_responses=2)
    first = session_of([1, 2, 3, 10], pool=pool, recent=0)
    first.observe(Commit([[11, 12]]))
    assert pool.ids.tolist() == [-1, -1, 10, 11, 12]
    second = session_of([5, 10], pool=pool, recent=0)
    assert drafted(second.propose(context_of(second, [3]))) == [11, 12]
    prompt = session_of([5, 2], pool=pool, recent=0)
    assert drafted(prompt.propose(context_of(prompt, [3]))) == []
    # The oldest response has left for the third one.
    assert pool.ids.tolist() == [-1, -1, 10, -1, 2]
    without = session_of([5, 10], recent=0)
    assert drafted(without.propose(context_of(without, [3]))) == []


@pytest.mark.parametrize(
    "bad",
    [
        {"scoring": "best"},
        {"max_depth": 1},
        {"max_occurrences": 0},
        {"min_prob": 1.5},
        {"min_prob": -0.1},
        {"escape": -1.0},
        {"recent": -1},
        {"max_spec_factor": -1.0},
        {"corpus_size": -1},
        {"num_assistant_tokens": 0},
        {"tree_nodes": -1},
    ],
)
def test_bad_configs_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        NgramConfig(**bad)


def test_a_pool_of_nothing_is_refused():
    with pytest.raises(ValueError, match="max_responses"):
        SharedPool(0)


# Against transformers' prompt lookup


def lookup(text: list[int], tokens: int = 10, **settings) -> list[int]:
    generator = PromptLookupCandidateGenerator(num_output_tokens=tokens, max_length=10**6, **settings)
    return generator.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()


def test_facts_of_prompt_lookup():
    assert lookup([1, 2, 3, 4, 1, 2, 5, 6, 1, 2], 3) == [3, 4, 1]
    assert lookup([7, 8, 9, 8], 3) == [9, 8]
    assert lookup([1, 2, 3], 3) == []
    assert lookup([5, 5, 5, 5], 3) == [5, 5]
    assert lookup([1, 2, 3, 4, 1, 2], 3, eos_token_id=torch.tensor([4])) == [3]


def edited_copy(rng: random.Random) -> tuple[list[int], list[int]]:
    """A text of frequent and rare words, and its copy in which a tenth of the words were exchanged."""
    text = [int(rng.paretovariate(0.7)) % 97 for _ in range(150)]
    return text, [rng.randrange(97) if rng.random() < 0.1 else token for token in text]


def tau(prompt: list[int], answer: list[int], propose) -> float:
    """Tokens per target pass when the target's answer is known, the first token (prefill) left out."""
    done, passes = 1, 0
    while done < len(answer):
        tokens, parents = propose(prompt + answer[:done])
        node, accepted = -1, 0
        for child, (token, parent) in enumerate(zip(tokens, parents)):
            # Parents precede children, so that one walk follows the accepted path.
            if parent == node and done + accepted < len(answer) - 1 and token == answer[done + accepted]:
                node, accepted = child, accepted + 1
        done, passes = done + accepted + 1, passes + 1
    return (len(answer) - 1) / passes


def test_more_tokens_per_pass_than_prompt_lookup_at_equal_nodes():
    rng = random.Random(5)
    gains = {False: [], True: []}
    for _ in range(6):
        prompt, answer = edited_copy(rng)

        def by_lookup(text):
            found = lookup(text)
            return found, range(-1, len(found) - 1)

        base = tau(prompt, answer, by_lookup)
        for tree in gains:

            def by_ngram(text, tree=tree):
                session = session_of(text)
                draft = session.propose(context_of(session, [10], nodes=10, tree=tree))
                assert draft.shape[1] <= 10
                return drafted(draft), draft.parents[0].tolist()

            gains[tree].append(tau(prompt, answer, by_ngram) / base)
    assert min(gains[False]) > 1.2 and min(gains[True]) > 1.2


@pytest.mark.parametrize("tree", [False, True])
def test_generate_is_lossless_and_accepts(tree):
    target = tiny_llama()
    ids = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [3, 4, 3, 4, 3, 4, 3]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "max_new_tokens": 40, "do_sample": False}
    drafter = NgramDrafter(NgramConfig(tree_nodes=10 if tree else 0, policy="fixed"))
    plain = target.generate(**inputs)
    fast = target.generate(**inputs, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(fast.sequences, plain)
    assert fast.speculation.accepted > 0
    # A text that it knows by heart is drafted in full.
    drafter.set_corpus(plain)
    fast = target.generate(**inputs, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(fast.sequences, plain)
    assert fast.speculation.tau > 4


# Speed (process time; ten times what an idle core needs)


@pytest.mark.parametrize("period", [1, 50, 4000])
@pytest.mark.parametrize("scoring", ["blend", "suffix"])
def test_proposals_are_fast_on_long_repetitive_texts(scoring, period):
    rng = random.Random(3)
    text = [rng.randrange(3) if period == 4000 else i % period for i in range(4000)]
    start = time.process_time()
    session = session_of(text, scoring=scoring)
    assert time.process_time() - start < 0.1
    context = context_of(session, [10], nodes=10, tree=True)
    times = []
    for _ in range(5):
        start = time.process_time()
        session.propose(context)
        times.append(time.process_time() - start)
    assert min(times) < 0.02


def test_twenty_thousand_short_rows():
    rng = random.Random(4)
    rows = [[rng.randrange(8) for _ in range(4)] for _ in range(20_000)]
    start = time.process_time()
    session = session_of(*rows)
    session.propose(context_of(session, [2] * len(rows), nodes=4, tree=True))
    assert time.process_time() - start < 30
