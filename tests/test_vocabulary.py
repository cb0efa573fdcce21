"""Which tokens, how many, and the rows a head starts from."""

import resource
from functools import partial

import pytest
import torch
from conftest import tiny_llama
from datasets import Dataset
from safetensors.torch import save_file
from test_cli import byte_tokenizer, call
from transformers import GenerationConfig, GPTJConfig, GPTJForCausalLM

from hf_specdraft.drafters import TargetView
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.training import vocabulary as v
from hf_specdraft.training.data import load, prepare


def block(**fields):
    torch.manual_seed(0)
    return BlockDrafter(BlockConfig.tiny(**{"draft_vocab_size": None, **fields})).eval()


def rows(ids, mask):
    return Dataset.from_dict({"id": ["a"] * len(ids), "input_ids": ids, "loss_mask": mask})


# ---- which tokens ----


def test_the_targets_own_tokens_are_counted():
    data = rows([[5, 6, 6, 7], [6, 0]], [[False, True, True, True], [True, False]])
    assert v.count_answers(data, 9).tolist() == [0, 0, 0, 0, 0, 0, 3, 1, 0]
    with pytest.raises(ValueError, match="token 7, outside"):
        v.count_answers(data, 7)
    with pytest.raises(ValueError, match="nothing to count"):
        v.count_answers(rows([[5, 6]], [[False, False]]), 9)


def test_coverage_of_zipfs_law():
    harmonic = 1 / torch.arange(1, 1001).double()
    counts = (harmonic * 1e12).long()[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    covered = v.coverage(counts)
    assert covered[99] == pytest.approx(5.187 / 7.485, abs=5e-4) and covered[-1] == 1
    chosen = v.Vocabulary.largest(counts, 100)
    assert chosen.coverage == pytest.approx(0.693, abs=5e-4)
    assert (chosen.ids.diff() > 0).all() and counts[chosen.ids].min() >= counts.sort(descending=True).values[99]


def test_few_answers_cover_themselves_better_than_others():
    first, second = torch.tensor([4, 0, 2, 0]), torch.tensor([1, 3, 0, 0])
    # In the first half's order (0, 2, 1, 3) the second has 1, 1, 4, 4 of 4; the other way (1, 0, 2, 3) 0, 4, 6, 6 of 6.
    want = (torch.tensor([1, 1, 4, 4]) / 4 + torch.tensor([0, 4, 6, 6]) / 6) / 2
    torch.testing.assert_close(v.unseen_coverage(first, second), want.double(), atol=1e-6, rtol=0)
    assert (v.unseen_coverage(first, second) <= v.coverage(first + second)).all()


def test_control_tokens_stay_whatever_their_counts():
    counts = torch.tensor([4, 0, 4, 9, 0, 4])
    assert v.ranked(counts).tolist() == [3, 0, 2, 5, 1, 4]
    assert v.ranked(counts, [4]).tolist() == [4, 3, 0, 2, 5, 1]
    chosen = v.Vocabulary.largest(counts, 3, [4])
    assert chosen.ids.tolist() == [0, 3, 4]
    assert chosen.coverage == pytest.approx(13 / 21) == v.coverage(counts, [4])[2].item()
    for size in (0, 7):
        with pytest.raises(ValueError, match=f"of {size} tokens"):
            v.Vocabulary.largest(counts, size)
    with pytest.raises(ValueError, match="the 2 that are always kept"):
        v.Vocabulary.largest(counts, 1, [1, 4])


def test_control_tokens():
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<turn>", "<other>"])
    tokenizer.chat_template = "<turn>{{ messages }}"
    ids = v.control_tokens(tokenizer, GenerationConfig(eos_token_id=[7, 9], bos_token_id=3))
    turn, other = tokenizer.convert_tokens_to_ids(["<turn>", "<other>"])
    newline = tokenizer.encode("\n")
    assert {turn, 3, 7, 9, tokenizer.pad_token_id, *newline} == set(ids) and other not in ids


def test_files(tmp_path):
    counts = torch.tensor([4, 0, 4, 9, 0, 4])
    chosen, path = v.Vocabulary.largest(counts, 3, [4]), tmp_path / "kept.safetensors"
    chosen.save(path, target="t")
    for loaded in (v.Vocabulary.load(path), v.draft_vocabulary(path, counts=None)):
        assert torch.equal(loaded.ids, chosen.ids) and torch.equal(loaded.counts, counts)
    assert v.draft_vocabulary(3, lambda: counts, [4]).ids.tolist() == [0, 3, 4]
    for ids in ([3, 1], [1, 1], [2, 6], []):
        save_file({"draft_ids": torch.tensor(ids), "counts": counts}, path)
        with pytest.raises(ValueError, match="not ascending tokens"):
            v.Vocabulary.load(path)
    save_file({"counts": counts}, path)
    (tmp_path / "text").write_text("x")
    for file in (path, tmp_path / "text", tmp_path / "none"):
        with pytest.raises(ValueError, match="hf-specdraft vocabulary"):
            v.Vocabulary.load(file)


# ---- how many ----


def problem(seed: int, size: int = 20_000):
    """A utility by size for random counts of a random steepness, a head linear in its rows, and the rest of a round."""
    generator = torch.Generator().manual_seed(seed)
    steepness, acceptance, rest = (low + span * torch.rand((), generator=generator) for low, span in
                                   ((0.9, 0.6), (0.5, 0.4), (0.3, 2.0)))  # fmt: skip
    counts = (1e9 * torch.rand(size, generator=generator) / torch.arange(1, size + 1) ** steepness).long()
    covered = v.coverage(counts)

    def utility(rows: int, rest: float = float(rest)) -> float:
        return v.speed(float(covered[rows - 1]), rows / size, float(acceptance), depth=7, rest=rest)

    return covered, utility


def grid(utility, smallest: int, largest: int, step: int = v.STEP) -> int:
    """The exhaustive reference."""
    sizes = [min(step * n, largest) for n in range(-(-smallest // step), -(-largest // step) + 1)]
    return max(sizes, key=utility)


def test_the_search_finds_what_an_exhaustive_one_finds():
    inner = 0
    for seed in range(20):
        covered, utility = problem(seed)
        best, found = grid(utility, 1, 20_000), v.choose_size(utility, 1, 20_000)
        assert found % v.STEP == 0 or found == 20_000
        assert utility(found) >= 0.995 * utility(best)
        inner += v.STEP < best < 20_000
    assert inner >= 5  # bounds alone would not do


def test_more_coverage_or_a_slower_target_never_lower_the_size():
    minima = (0.5, 0.9, 0.99, 1)
    for seed in range(3):
        covered, utility = problem(seed)
        bounds = [v.smallest_size(covered, minimum) for minimum in minima]
        for minimum, bound in zip(minima, bounds):
            assert covered[bound - 1] >= minimum - 1e-9 and (bound == 1 or covered[bound - 2] < minimum)
        exact = [grid(utility, bound, 20_000) for bound in bounds]
        assert exact == sorted(exact) and exact[0] < exact[-1]
        slower = [grid(partial(utility, rest=rest), 1, 20_000) for rest in (0.2, 1.0, 5.0, 25.0)]
        assert slower == sorted(slower) and slower[0] < slower[-1]
    chosen = [v.choose_size(utility, bound, 20_000) for bound in bounds]
    assert chosen == sorted(chosen) and all(size >= bound for size, bound in zip(chosen, bounds))
    assert v.smallest_size(covered, 0.0, always=300) == 300
    with pytest.raises(ValueError, match="between 0 and 1"):
        v.smallest_size(covered, 1.5)


def test_utilities():
    assert v.speed(1.0, 0.5, 1.0, 3, 1.5) == 2.0  # four tokens in two seconds
    assert v.speed(0.5, 1.0, 0.8, 1, 1.0) == pytest.approx(0.7)
    assert v.linear(0.9, 1.0, 4.0, 0.75) == pytest.approx(0.6125)


def test_head_times_are_interpolated_and_never_fall():
    times = v.HeadTimes([100, 200, 400], [1.0, 3.0, 2.0])
    assert [times(size) for size in (50, 100, 150, 200, 300, 400)] == [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_a_larger_head_takes_longer(monkeypatch):
    monkeypatch.setattr(v, "measure", lambda function, real=v.measure: real(function, 0.1))
    dense = v.measure_head(256, [128, 65536], positions=4)  # 512 times the work: no load of the machine hides it
    assert dense(128) < dense(65536)
    low = v.measure_head(1024, [16384], positions=1, rank=16)
    assert low(16384) < v.measure_head(1024, [16384], positions=1)(16384)
    assert v.measure_target(tiny_llama(), 4) > 0


# ---- the rows ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_an_exact_copy(dtype):
    model = tiny_llama(tie_word_embeddings=True).to(dtype)
    before = model.lm_head.weight.clone()
    ids = torch.tensor([3, 9, 60])
    got = v.head_rows(TargetView(model), ids)
    assert torch.equal(got, before[ids]) and torch.equal(v.head_rows(TargetView(model)), before)
    got += 1
    assert torch.equal(model.lm_head.weight, before) and torch.equal(model.model.embed_tokens.weight, before)


def test_a_head_with_a_bias_is_not_copied():
    sizes = dict(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=16, rotary_dim=4)
    model = GPTJForCausalLM(GPTJConfig(**sizes, bos_token_id=None, eos_token_id=None))
    v.head_rows(TargetView(model))  # a bias of zeros loses nothing
    model.lm_head.bias.data[3] = 1
    with pytest.raises(ValueError, match="has a bias"):
        v.head_rows(TargetView(model))


def test_factors_of_full_rank_are_the_head():
    torch.manual_seed(0)
    dense, hidden = torch.randn(200, 32), torch.randn(500, 32) @ torch.randn(32, 32)
    for states in (None, hidden, hidden[:5]):
        down, up = v.factorize(dense, 32, states)
        torch.testing.assert_close(hidden @ down.T @ up.T, hidden @ dense.T, atol=1e-4 * 300, rtol=1e-4)
        torch.testing.assert_close(up @ down, dense, atol=1e-4, rtol=1e-4)


def test_factors_fit_the_states_they_will_read():
    torch.manual_seed(0)
    dense = torch.randn(200, 32)
    hidden = torch.randn(2000, 32) * torch.logspace(0, -2, 32)  # few directions matter
    hidden = hidden @ torch.linalg.qr(torch.randn(32, 32)).Q

    def error(rank, states):
        down, up = v.factorize(dense, rank, states)
        assert down.shape == (rank, 32) and up.shape == (200, rank)
        assert torch.linalg.matrix_rank(up @ down) <= rank
        return float((hidden @ (up @ down - dense).T).square().mean())

    assert error(8, hidden) < 0.3 * error(8, None)
    assert error(4, hidden) > error(8, hidden) > error(16, hidden)
    # Without states it is the truncated SVD, the nearest matrix of its rank.
    u, s, w = torch.linalg.svd(dense, full_matrices=False)
    down, up = v.factorize(dense, 8)
    torch.testing.assert_close(up @ down, u[:, :8] * s[:8] @ w[:8], atol=1e-4, rtol=1e-4)
    for rank in (0, 33):
        with pytest.raises(ValueError, match="between 1 and the hidden size 32"):
            v.factorize(dense, rank)


def test_states_are_those_before_the_targets_own_tokens():
    model = tiny_llama()
    ids = [[5, 6, 7, 8], [9, 1, 2], [3, 4]]
    data = rows(ids, [[False, False, True, True], [True, False, True], [False, True]])
    want = [model.model(torch.tensor([row])).last_hidden_state[0].detach() for row in ids]
    want = torch.cat([want[0][[1, 2]], want[1][[1]], want[2][[0]]])
    torch.testing.assert_close(v.head_states(model, data), want)
    torch.testing.assert_close(v.head_states(model, data, tokens=3), want[:3])
    model.lm_head(want)  # nothing listens any more
    assert not model.lm_head._forward_pre_hooks


def test_a_head_starts_as_the_targets():
    model = tiny_llama()
    view, hidden, ids = TargetView(model), torch.randn(40, 32), torch.tensor([60, 2, 30])
    want = model.lm_head(hidden)
    for fields in ({}, dict(draft_head_rank=32)):
        whole, trimmed = block(**fields), block(draft_vocab_size=3, **fields)
        v.initialize_head(whole, view, hidden=hidden)
        v.initialize_head(trimmed, view, ids, hidden)
        torch.testing.assert_close(whole.logits(view, hidden), want, atol=1e-4, rtol=0)
        assert trimmed.draft_token_ids.tolist() == [2, 30, 60]
        torch.testing.assert_close(trimmed.logits(view, hidden), want[:, [2, 30, 60]], atol=1e-4, rtol=0)
    for drafter, tokens, message in (
        (block(own_head=False), None, "own_head=True"),
        (block(hidden_size=16, target_hidden_size=32), None, "reads 16 values and the target's 32"),
        (block(draft_vocab_size=4), ids, "made for 4 tokens and ids names 3"),
        (block(draft_vocab_size=4), None, "made for 4 tokens and the target has 64"),
    ):
        with pytest.raises(ValueError, match=message):
            v.initialize_head(drafter, view, tokens)


@pytest.mark.parametrize("fields", [dict(own_head=False), {}, dict(draft_head_rank=8), dict(draft_vocab_size=50)])
def test_trimming_keeps_the_rows(fields):
    view, hidden = TargetView(tiny_llama()), torch.randn(5, 32)
    drafter = block(**fields)
    ids = torch.tensor([40, 3, 9])
    trimmed = v.trim(drafter, ids, view)
    assert trimmed.draft_token_ids.tolist() == [3, 9, 40] and trimmed.config.draft_vocab_size == 3
    torch.testing.assert_close(trimmed.logits(view, hidden), drafter.logits(view, hidden)[:, [3, 9, 40]])
    assert torch.equal(trimmed.fc.weight, drafter.fc.weight)
    assert drafter.config.draft_vocab_size == fields.get("draft_vocab_size")
    with pytest.raises(ValueError, match="no row for 1 of the 2 tokens, such as 40"):
        v.trim(v.trim(drafter, ids[1:], view), ids[:2])
    if not drafter.config.own_head:
        with pytest.raises(ValueError, match="give the target"):
            v.trim(drafter, ids)


# ---- the command ----


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("vocabulary")
    tiny_llama(vocab=256).save_pretrained(root / "target")
    byte_tokenizer().save_pretrained(root / "target")
    text = "the answers are mostly made of few letters, and of spaces"
    answers = [{"id": str(i), "prompt": f"say {i}", "answer": text} for i in range(12)]
    prepare(answers, byte_tokenizer(), root / "answers", held_out=0.3)
    return root


def test_the_command_chooses_and_writes(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(v, "measure", lambda function, real=v.measure: real(function, 0.01))
    shared = ("vocabulary", "--target", folders / "target", "--answers", folders / "answers")
    for name, options in (
        ("a", ["--size", "100"]),
        ("b", ["--utility", "linear", "--rank", "4"]),
        ("c", ["--sequential"]),
    ):
        out = call(*shared, "--output", tmp_path / name, *options)
        found = v.Vocabulary.load(tmp_path / name)
        assert out.exit_code == 0 and f"{len(found.ids)} of 256 tokens" in out.output and "coverage" in out.output
        # What is held out for evaluation is not counted.
        train, held_out, _ = load(folders / "answers")
        assert len(train) + len(held_out) == 12
        assert found.coverage >= 0.98 and int(found.counts.sum()) == len(train) * 57
        assert set(byte_tokenizer().encode("\n")) <= set(found.ids.tolist())
        assert name != "a" or len(found.ids) == 100
    with pytest.raises(ValueError, match="of 1 tokens is not between"):
        call(*shared, "--output", tmp_path / "d", "--size", "1")
    assert not (tmp_path / "d").exists()


def test_the_command_says_what_is_wrong(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(v, "measure", lambda function: 1e-3)
    shared = ("vocabulary", "--target", folders / "target", "--size", "100", "--output")
    with pytest.raises(ValueError, match="is no data folder: it has no specdraft.json"):
        call(*shared, tmp_path / "out", "--answers", folders)
    with pytest.raises(ValueError, match=f"train is one split of a data folder; give the whole, {folders}"):
        call(*shared, tmp_path / "out", "--answers", folders / "answers" / "train")
    with pytest.raises(ValueError, match="there is no folder"):
        call(*shared, tmp_path / "none" / "out", "--answers", folders / "answers")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # the operating system refuses the file in the middle
        with pytest.raises(OSError, match="cannot write"):
            call(*shared, tmp_path / "out", "--answers", folders / "answers")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
