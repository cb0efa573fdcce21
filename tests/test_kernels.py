"""Every implementation against reference.py where it is ugly, the registered attention, and the law of the output.

The Triton kernels run in Triton's interpreter, in a process of their own (`test_triton_in_its_interpreter`): the
interpreter must be asked for before triton is first imported. On a GPU they run compiled, here.
"""

import importlib.util
import math
import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from scipy.stats import chisquare
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hf_specdraft import kernels, verification
from hf_specdraft.draft import Draft, Law
from hf_specdraft.kernels import interface, sdpa, tree_attention, use, verify_chain, why

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None
FAST = ["fallback"] + ["triton"] * (HAS_TRITON and (INTERPRETED or DEVICE == "cuda"))


@pytest.fixture
def dirty_memory():
    """Fresh memory is NaN (floats) or the largest integer, so that whatever is read before it is written shows."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


def assert_same(name, got, want, **tolerance):
    torch.testing.assert_close(got, want, msg=lambda text: f"{name}: {text}", **tolerance)


def random_parents(nodes, generator):
    return [-1] + [int(torch.randint(-1, i, (), generator=generator)) for i in range(1, nodes)]


def tree_mask(parents, context, pads, window=None):
    """[B, 1, N+1, context + N + 1]: anchor and nodes over the columns before the anchor, and over themselves."""
    columns = context + len(parents) + 1
    mask = torch.zeros(len(pads), 1, len(parents) + 1, columns, dtype=torch.bool)
    for b, pad in enumerate(pads):
        for row in range(len(parents) + 1):
            path, node = [0], row - 1
            while node >= 0:
                path.append(node + 1)
                node = parents[node]
            depth = len(path) - 1
            place = {context + n: context + d for n, d in zip(path, [0] + sorted(range(1, depth + 1), reverse=True))}
            place.update({c: c for c in range(pad, context)})
            for column, position in place.items():
                mask[b, 0, row, column] = window is None or context + depth - position < window
    return mask


# nodes, context, query heads, key heads, width of keys, of values, pads, window
ATTENTION_CASES = [
    (1, 0, 1, 1, 64, 64, [0], None),
    (3, 0, 4, 2, 60, 60, [0, 0], None),
    (7, 5, 6, 2, 60, 60, [0, 4, 2], None),
    (33, 37, 4, 4, 64, 64, [0, 30], None),
    (63, 21, 8, 2, 64, 64, [7], None),
    (63, 700, 2, 1, 64, 64, [3, 690], None),  # several parts of columns, some of which a row never sees
    (7, 40, 4, 1, 16, 24, [0, 39], 9),  # values of their own width; a window that ends inside the tree's depth
    (12, 600, 2, 2, 20, 20, [0], 5),
]


def attention_case(case, dtype=torch.float32, seed=0):
    nodes, context, query_heads, key_heads, width, value_width, pads, window = case
    generator = torch.Generator().manual_seed(seed)
    mask = tree_mask(random_parents(nodes, generator), context, pads, window)
    batch, rows, columns = len(pads), mask.shape[2], mask.shape[3]
    shapes = {
        "query": (batch, rows, query_heads, width),
        "key": (batch, columns, key_heads, width),
        "value": (batch, columns, key_heads, value_width),
    }
    tensors = {  # transposed views, as models make them
        name: torch.randn(shape, generator=generator).transpose(1, 2).to(DEVICE, dtype)
        for name, shape in shapes.items()
    }
    return *tensors.values(), mask.to(DEVICE), width**-0.5


def test_tree_mask_of_this_file():
    mask = tree_mask([-1, 0, -1], 2, [1], window=3)
    want = [[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 1]]
    assert mask[0, 0].int().tolist() == want


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_attention_equals_reference(name, case, dirty_memory):
    arguments = attention_case(case)
    with use("reference"):
        want = tree_attention(*arguments)
    with use(name):
        assert_same(f"{name} out", tree_attention(*arguments), want, atol=2e-6, rtol=1e-5)
    assert why()["tree_attention"] == f"{name} (forced by use())"


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_in_half_precision(name, dtype, dirty_memory):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter's dot multiplies the bit patterns of bfloat16")
    arguments = attention_case((7, 37, 4, 2, 60, 60, [0, 9], None), dtype)
    with use("reference"):
        want = tree_attention(*arguments)
    with use(name):
        got = tree_attention(*arguments)
    assert got.dtype == dtype
    assert_same(f"{name} out", got, want, atol=8 * torch.finfo(dtype).eps, rtol=0)


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_attention_of_a_row_that_sees_nothing_is_zero(name, dirty_memory):
    query, key, value, mask, scale = attention_case((3, 300, 4, 2, 16, 16, [0, 0], None))
    mask[0, 0, 2] = False
    with use(name):
        out = tree_attention(query, key, value, mask, scale)
    assert_same(f"{name} blind row", out[0, :, 2], torch.zeros_like(out[0, :, 2]))
    assert bool((out[1] != 0).all())


@pytest.mark.parametrize("name", FAST)
def test_attention_takes_a_mask_shared_by_the_rows(name):
    query, key, value, mask, scale = attention_case((7, 20, 4, 2, 16, 16, [0, 0], None))
    with use("reference"):
        want = tree_attention(query, key, value, mask, scale)
    with use(name):
        assert_same(f"{name} out", tree_attention(query, key, value, mask[:1], scale), want, atol=2e-6, rtol=1e-5)


def laws(p, kind, generator):
    """The law [B, N, V] that nodes are drawn from, and the `Law` record; None for point rows."""
    batch, nodes, vocab_size = p.shape
    if kind == "point":
        return None, None
    rows = torch.ones(batch, dtype=torch.bool)
    if kind == "mixed":
        rows[::2] = False
    if kind == "narrow":  # a dense law over fewer ids than the target has
        q = torch.rand(batch, nodes, vocab_size - 2, generator=generator)
        q[..., vocab_size // 3] = vocab_size
        q /= q.sum(-1, keepdim=True)
        return torch.nn.functional.pad(q, (0, 2)), Law(q, None, rows)
    order = torch.rand(p.shape, generator=generator)
    order[..., vocab_size // 3] = -1
    ids = order.argsort(-1)[..., : max(2, vocab_size // 2)]
    probs = torch.rand(ids.shape, generator=generator)
    probs[..., 0] = vocab_size
    probs /= probs.sum(-1, keepdim=True)
    q = torch.zeros_like(p).scatter_(-1, ids, probs)
    return q, Law(q, None, rows) if kind == "dense" else Law(probs, ids, rows)


def chain_case(batch, nodes, vocab_size, kind, dtype=torch.float32, seed=0):
    """Chains of unequal length whose tokens are accepted often enough to end anywhere; many logits are -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, nodes + 1, vocab_size, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.4] = -torch.inf
    # The favourite of target and drafter; a row without a draft has none, so that its draws spread over the vocabulary.
    logits[..., vocab_size // 3] = 2.5 + math.log(vocab_size) if nodes else 2.5
    p = logits.softmax(-1)[:, :nodes]
    q, law = laws(p, kind, generator)
    tokens = (p if q is None else q).reshape(-1, vocab_size).multinomial(1, generator=generator).view(batch, nodes)
    likely = torch.rand(batch, nodes, generator=generator) < 0.6
    if q is None:
        tokens = torch.where(likely, p.argmax(-1), tokens)
    lengths = torch.randint(0, nodes + 1, (batch,), generator=generator)
    padding = torch.arange(nodes) >= lengths[:, None]
    tokens[padding] = -1
    logits[:, 1:][padding] = torch.nan  # the row after a token that is not there
    uniforms = torch.rand(batch, nodes + 1, generator=generator)
    return dict(
        logits=logits.to(DEVICE, dtype),
        tokens=tokens,
        lengths=lengths,
        law=law,
        accept_uniforms=uniforms[:, :-1] ** 3,
        emit_uniforms=uniforms[:, -1],
    )


# Under the interpreter a program takes milliseconds.
CHAINS, SETTINGS = (5, [(0.7, 1)]) if INTERPRETED else (24, [(1.0, 0), (0.7, 1), (1.6, 2)])


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("kind", ["point", "dense", "sparse", "narrow", "mixed"])
@pytest.mark.parametrize(("nodes", "vocab_size"), [(0, 9001), (1, 2), (5, 60), (3, 9001)])
def test_verification_equals_reference(name, kind, nodes, vocab_size, dirty_memory):
    if kind == "narrow" and vocab_size == 2:
        pytest.skip("nothing would be left of the law")
    counts = set()
    for temperature, seed in SETTINGS:
        case = chain_case(CHAINS, nodes, vocab_size, kind, seed=seed)
        results = {}
        for implementation in ("reference", name):
            with use(implementation):
                results[implementation] = verify_chain(**case, temperature=temperature, greedy=False)
        assert_same(f"{name} accepted", results[name][0], results["reference"][0])
        assert_same(f"{name} next_token", results[name][1], results["reference"][1])
        counts.update(results[name][0].tolist())
    assert len(counts) > 1 or nodes == 0, "every chain ended at the same place"


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_verification_of_half_precision_logits(name, dtype, dirty_memory):
    case = chain_case(CHAINS, 4, 300, "sparse", dtype)
    results = {}
    for implementation in ("reference", name):
        with use(implementation):
            results[implementation] = verify_chain(**case, greedy=False)
    assert_same(f"{name} accepted", results[name][0], results["reference"][0])
    assert_same(f"{name} next_token", results[name][1], results["reference"][1])


@pytest.mark.parametrize("name", ["reference", *FAST])
@pytest.mark.parametrize("vocab_size", [2, 60, 9001])
def test_greedy_verification(name, vocab_size, dirty_memory):
    case = chain_case(CHAINS, 5, vocab_size, "point", torch.bfloat16)
    logits, lengths = case["logits"].cpu(), case["lengths"].tolist()
    # bfloat16 ties are common; make one of the largest value certain, at ids that a block boundary separates.
    logits[:, :, [vocab_size // 2, vocab_size - 1]] = torch.where(logits[:, :, :2].isnan(), logits[:, :, :2], 30.0)
    best = [[row.tolist().index(max(row.tolist())) for row in logits[b, : n + 1]] for b, n in enumerate(lengths)]
    tokens, want = torch.full((len(lengths), 5), -1), []
    for b, n in enumerate(lengths):
        tokens[b, :n] = torch.tensor(best[b][:n])
        wrong = b % 6
        if wrong < n:
            tokens[b, wrong] = (best[b][wrong] + 1) % vocab_size
        want.append((min(wrong, n), best[b][min(wrong, n)]))
    with use(name):
        accepted, next_token = verify_chain(logits.to(DEVICE), tokens, case["lengths"], greedy=True)
    assert list(zip(accepted.tolist(), next_token.tolist())) == want


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_drawn_rows_agree_with_walk(name):
    nodes, vocab_size = 4, 30
    case = chain_case(4 * CHAINS, nodes, vocab_size, "sparse")
    draft = Draft.chain(case["tokens"].clamp(min=0), case["lengths"].tolist(), law=case["law"])
    p = case["logits"].float().cpu().softmax(-1)
    rows = torch.arange(len(p))
    verdict = verification.walk(
        lambda index, alive: p[rows, index].nan_to_num(),
        draft,
        case["accept_uniforms"],
        case["emit_uniforms"],
        vocab_size,
    )
    with use(name):
        accepted, next_token = verify_chain(**case, greedy=False)
    assert_same(f"{name} accepted", accepted.cpu(), verdict.length)
    assert_same(f"{name} next_token", next_token.cpu(), verdict.next_token)


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_a_rejection_by_rounding_alone_emits_from_p(name):
    """p equals q but for the last bits, and the token is rejected all the same."""
    p = torch.tensor([0.25, 0.5, 0.25])
    q = p.clone()
    q[0] += 1e-7
    law = Law(q.expand(4, 1, 3), None, torch.ones(4, dtype=torch.bool))
    uniforms = torch.tensor([0.1, 0.3, 0.7, 0.9])
    with use(name):
        accepted, next_token = verify_chain(
            p.log().expand(4, 2, 3).to(DEVICE),
            torch.zeros(4, 1, dtype=torch.long),
            torch.ones(4, dtype=torch.long),
            law=law,
            accept_uniforms=torch.full((4, 1), 1 - 2**-24),
            emit_uniforms=uniforms,
            greedy=False,
        )
    assert accepted.tolist() == [0] * 4
    assert next_token.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("name", ["reference", *FAST])
def test_an_impossible_token_is_never_emitted(name):
    """Token 1 has p = 0 and q = 1: always rejected, and what replaces it comes from the row that rejected it."""
    batch = 4 * CHAINS
    logits = torch.tensor([[0.0, -torch.inf, 0.0, -torch.inf], [-torch.inf, 0.0, -torch.inf, 0.0]])
    with use(name):
        accepted, next_token = verify_chain(
            logits.expand(batch, 2, 4).to(DEVICE),
            torch.ones(batch, 1, dtype=torch.long),
            torch.ones(batch, dtype=torch.long),
            accept_uniforms=torch.zeros(batch, 1),
            emit_uniforms=torch.arange(batch) / batch,
            greedy=False,
        )
    assert accepted.tolist() == [0] * batch
    assert next_token.tolist() == [0] * (batch // 2) + [2] * (batch // 2)


def p_value(kind, claimed=None, draws=40_000, vocab_size=6, seed=0):
    """Three tokens by verify_chain on chains of two, against their exact joint law: the p-value of a chi-square test.

    kind: how the chain is made, and which law is stated. claimed: state another one (a bias, if it is not `kind`).
    """
    generator = torch.Generator().manual_seed(seed)
    tables = [torch.randn(*(vocab_size,) * (depth + 1), generator=generator) for depth in range(3)]
    drafter = [torch.rand(*(vocab_size,) * (depth + 1), generator=generator) for depth in range(2)]
    drafter = [(q * (q > 0.3)) / (q * (q > 0.3)).sum(-1, keepdim=True) for q in drafter]

    def draw(probs):
        return probs.multinomial(1, generator=generator).squeeze(1)

    q = [drafter[0].expand(draws, -1)]
    first = q[0].argmax(-1) if kind == "point" else draw(q[0])
    q.append(drafter[1][first])
    second = q[1].argmax(-1) if kind == "point" else draw(q[1])
    tokens, probs = torch.stack([first, second], 1), torch.stack(q, 1)
    ids = torch.arange(vocab_size).flip(0).expand_as(probs)
    law = {
        "point": None,
        "dense": Law(probs, None, torch.ones(draws, dtype=torch.bool)),
        "sparse": Law(probs.flip(-1), ids, torch.ones(draws, dtype=torch.bool)),
        "mixed": Law(probs, None, torch.arange(draws) % 2 == 0),
    }[claimed or kind]
    logits = torch.stack([tables[0].expand(draws, -1), tables[1][first], tables[2][first, second]], 1)
    uniforms = torch.rand(draws, 3, generator=generator)
    accepted, next_token = verify_chain(
        logits,
        tokens,
        torch.arange(draws) % 3,  # chains of none, one and two
        temperature=0.8,
        law=law,
        accept_uniforms=uniforms[:, :2],
        emit_uniforms=uniforms[:, 2],
        greedy=False,
    )
    assert set(accepted.tolist()) == {0, 1, 2}
    out = torch.cat([tokens, tokens[:, :1]], 1)
    out[torch.arange(draws), accepted] = next_token
    p = [(table / 0.8).softmax(-1) for table in tables]
    for depth in (1, 2):  # what a short round has not decided is drawn plainly
        plain = draw(p[depth][tuple(out[:, :depth].T)])
        out[:, depth] = torch.where(accepted < depth, plain, out[:, depth])
    joint = p[0][:, None, None] * p[1][:, :, None] * p[2]
    seen = torch.bincount((out * torch.tensor([vocab_size**2, vocab_size, 1])).sum(1), minlength=vocab_size**3)
    want = joint.flatten().double()
    want *= draws / want.sum()
    rare = want < 5  # chi-square's rule of thumb: such cells count as one
    pooled = [torch.cat([cells[~rare].double(), cells[rare].double().sum()[None]]) for cells in (seen, want)]
    return chisquare(*(cells[pooled[1] > 0].numpy() for cells in pooled)).pvalue


@pytest.mark.parametrize("kind", ["point", "dense", "sparse", "mixed"])
def test_the_law_of_the_output_is_the_targets(kind):
    assert p_value(kind) > 1e-3


def test_a_wrong_law_is_seen():
    """A token chosen by argmax, stated as drawn (5.24 does this on one path): the same test must fail."""
    assert p_value("point", claimed="dense") < 1e-6


def test_a_wrong_residual_is_seen(monkeypatch):
    monkeypatch.setattr(sdpa, "residual", lambda p, q: p)
    assert p_value("dense") < 1e-6


def peak_bytes(run):
    """The most memory PyTorch's CPU allocator held during `run` beyond what it held before."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    held = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("kind", ["point", "sparse"])
def test_the_fallback_never_holds_all_rows_in_float32(kind):
    batch, nodes, vocab_size = 2, 31, 20_000
    case = chain_case(batch, nodes, vocab_size, kind, torch.bfloat16)
    if kind == "sparse":  # as drafters make them
        case["law"] = Law(
            case["law"].probs[..., :8].contiguous(), case["law"].ids[..., :8].contiguous(), case["law"].rows
        )
    one_row_each = batch * vocab_size * 4
    all_rows = (nodes + 1) * one_row_each
    assert peak_bytes(lambda: case["logits"].float().softmax(-1)) >= all_rows
    with use("fallback"):
        peak = peak_bytes(lambda: verify_chain(**case, greedy=False))
        assert one_row_each <= peak < 10 * one_row_each, f"{peak / one_row_each:.1f} x [B, V] float32"
        assert (
            peak_bytes(lambda: verify_chain(case["logits"], case["tokens"], case["lengths"], greedy=True))
            < one_row_each
        )


def test_bad_arguments_are_refused():
    case = chain_case(2, 3, 7, "point")
    with pytest.raises(ValueError, match="temperature must be positive to sample, got 0"):
        verify_chain(**case, temperature=0, greedy=False)
    with pytest.raises(ValueError, match="needs accept_uniforms"):
        verify_chain(case["logits"], case["tokens"], case["lengths"], greedy=False)
    with pytest.raises(ValueError, match="no kernels named 'cuda'; there are fallback, reference, triton"), use("cuda"):
        pass


def test_the_choice_says_why(caplog, monkeypatch):
    monkeypatch.setattr(kernels, "_chosen", {})
    kernels._log_once.cache_clear()
    query, key, value, mask, scale = (x.cpu() if torch.is_tensor(x) else x for x in attention_case(ATTENTION_CASES[0]))
    with caplog.at_level("INFO", logger="hf_specdraft.kernels"):
        for _ in range(3):
            tree_attention(query, key, value, mask, scale)
    reason = "the tensors are on cpu" if HAS_TRITON else "triton is not installed"
    assert why() == {"tree_attention": f"fallback (triton refused: {reason})"}
    assert [record.message for record in caplog.records] == [f"tree_attention: {why()['tree_attention']}"]


def test_an_override_ends_with_its_block():
    arguments = attention_case(ATTENTION_CASES[0])
    with pytest.raises(RuntimeError, match="inside"), use("reference"):
        raise RuntimeError("inside")
    tree_attention(*arguments)
    assert "forced" not in why()["tree_attention"]


def test_what_triton_refuses():
    class OnGPU:
        is_cuda, requires_grad, dtype, shape = True, False, torch.bfloat16, (1, 2, 3, 64)
        element_size = staticmethod(lambda: 2)

    class Double(OnGPU):
        dtype = torch.float64

    class Wide(OnGPU):
        shape = (1, 2, 3, 512)

    class Trained(OnGPU):
        requires_grad = True

    refuses = kernels._triton_refuses
    if not HAS_TRITON:
        pytest.skip("without triton it refuses everything")
    assert refuses("tree_attention", OnGPU()) is None
    assert refuses("verify_chain", Wide()) is None
    assert "wider" in refuses("tree_attention", Wide())
    assert "float64" in refuses("verify_chain", Double())
    assert "backward" in refuses("tree_attention", Trained())


def tiny(model_class, attention):
    config_class = {LlamaForCausalLM: LlamaConfig, Qwen2ForCausalLM: Qwen2Config}[model_class]
    config = config_class(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
        attn_implementation=attention,
    )
    torch.manual_seed(0)
    return model_class(config).eval()


MODELS = [LlamaForCausalLM, Qwen2ForCausalLM]
PROMPTS = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(3))
PADDING = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1], [1] * 9])


@pytest.mark.parametrize("model_class", MODELS)
def test_registered_attention_generates_as_sdpa(model_class):
    outputs = [
        tiny(model_class, attention).generate(
            PROMPTS, attention_mask=PADDING, max_new_tokens=12, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )
        for attention in ("sdpa", kernels.ATTENTION_NAME)
    ]  # fmt: skip
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist()
    assert_same("logits", torch.stack(outputs[1].logits), torch.stack(outputs[0].logits))


@pytest.mark.parametrize("model_class", MODELS)
@pytest.mark.parametrize("name", ["fallback", "reference"])
def test_a_tree_pass_scores_each_node_as_its_own_path(model_class, name):
    """Anchor and nodes in one pass of the registered attention, and the same pass with sdpa, and path by path."""
    parents = [-1, 0, 0, -1, 3, 2]
    tokens = torch.randint(1, 64, (2, 6), generator=torch.Generator().manual_seed(4))
    depths = [1, 2, 2, 1, 2, 3]
    context = PROMPTS.shape[1] - 1
    mask = tree_mask(parents, context, [4, 0])
    start = PADDING.sum(1, keepdim=True) - 1
    logits = {}
    for attention in ("sdpa", kernels.ATTENTION_NAME):
        model = tiny(model_class, attention)
        with torch.no_grad():
            positions = (PADDING.cumsum(1) - 1).clamp(min=0)
            past = model(PROMPTS[:, :-1], attention_mask=PADDING[:, :-1], position_ids=positions[:, :-1])
            kernels._chosen.pop("tree_attention", None)
            with use(name):
                logits[attention] = model(
                    torch.cat([PROMPTS[:, -1:], tokens], 1),
                    attention_mask=mask,
                    position_ids=start + torch.tensor([[0, *depths]]),
                    cache=past.cache,
                ).logits
    assert why()["tree_attention"].startswith(name)
    assert_same("tree pass", logits[kernels.ATTENTION_NAME], logits["sdpa"], atol=1e-4, rtol=1e-4)
    for b, node in product(range(2), range(6)):
        path, at = [], node
        while at >= 0:
            path.insert(0, int(tokens[b, at]))
            at = parents[at]
        prompt = PROMPTS[b][PADDING[b].bool()].tolist()
        with torch.no_grad():
            want = model(torch.tensor([prompt + path])).logits[0, -1]
        assert_same(f"row {b} node {node}", logits[kernels.ATTENTION_NAME][b, node + 1], want, atol=1e-4, rtol=1e-4)


def test_attention_without_its_mask_function_ignores_padding():
    """The fact that makes the second registration necessary, and the padding test above able to fail."""
    AttentionInterface.register("specdraft_unmasked", interface.tree_attention_forward)
    try:
        wrong, right = (
            tiny(LlamaForCausalLM, attention)(PROMPTS, attention_mask=PADDING).logits[0, -1]
            for attention in ("specdraft_unmasked", kernels.ATTENTION_NAME)
        )
    finally:
        AttentionInterface._global_mapping.pop("specdraft_unmasked")
    alone = tiny(LlamaForCausalLM, "sdpa")(PROMPTS[:1, 4:]).logits[0, -1]
    assert_same("padded row", right, alone, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(wrong, alone, atol=1e-2)


def test_prefill_and_training_go_to_sdpa(monkeypatch):
    monkeypatch.setattr(interface, "tree_attention", lambda *_: pytest.fail("a long pass went to the tree kernel"))
    rows = interface._MAX_ROWS + 1
    module = torch.nn.Module()
    query = torch.randn(1, 2, rows, 8)
    mask = torch.ones(1, 1, rows, rows, dtype=torch.bool).tril()
    got, _ = interface.tree_attention_forward(module, query, query, query, mask)
    want = torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
    assert_same("prefill", got, want.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_what_would_be_dropped_silently_is_refused():
    query = torch.randn(1, 2, 3, 8)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="no attention sinks"):
        interface.tree_attention_forward(torch.nn.Module(), query, query, query, mask, s_aux=torch.zeros(2))
    with pytest.raises(ValueError, match="softcap"):
        interface.tree_attention_forward(torch.nn.Module(), query, query, query, mask, softcap=30.0)


def test_a_compiled_model_keeps_one_graph():
    model = tiny(LlamaForCausalLM, kernels.ATTENTION_NAME)
    mask = tree_mask([-1, 0, 0], 0, [0])
    tokens, positions = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 2, 2]])
    with torch.no_grad():
        want = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        got = compiled(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert_same("logits", got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(INTERPRETED or not HAS_TRITON, reason="starts the interpreter itself, and needs triton")
def test_triton_in_its_interpreter():
    """The tests of this file that have a Triton row, in a process whose kernels run on the CPU."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "triton and not interpreter", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout + run.stderr


COMPILED = {
    "triton_tree_attention._attend": [
        dict(D=60, DV=60, BLOCK_R=64, BLOCK_C=64, BLOCK_D=64, BLOCK_DV=64),
    ],
    "triton_verify._read_rows": [dict(GREEDY=True, BLOCK=4096), dict(GREEDY=False, BLOCK=4096)],
    "triton_verify._emit": [dict(HAS_LAW=True, BLOCK=4096)],
}
POINTERS = {
    **dict.fromkeys(["query", "key", "value", "logits"], "*bf16"),
    **dict.fromkeys(["tokens", "lengths", "choice", "accepted", "rejected_token", "next_token"], "*i64"),
    **dict.fromkeys(["out", "log_total", "p_of_token", "q", "uniforms"], "*fp32"),
    **dict.fromkeys(["scale", "temperature", "vanished"], "fp32"),
    "mask": "*u8",
}


@pytest.mark.skipif(INTERPRETED or not HAS_TRITON, reason="needs triton's compiler")
@pytest.mark.parametrize("kernel", COMPILED)
def test_kernels_compile_for_a_gpu_that_is_not_here(kernel, tmp_path, monkeypatch):
    """What the interpreter forgives (types, shapes of blocks, shared memory), the compiler does not."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # what it is today; unset, it warns
    module, name = kernel.split(".")
    function = getattr(importlib.import_module(f"hf_specdraft.kernels.{module}"), name)
    for constants in COMPILED[kernel]:
        types = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in function.arg_names}
        source = ASTSource(function, types, {(function.arg_names.index(n),): v for n, v in constants.items()})
        compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32))
        assert "cubin" in compiled.asm
        assert compiled.metadata.shared <= 99 * 1024, "more shared memory than a consumer GPU has"
