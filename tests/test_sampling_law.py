"""Sampled output has exactly the target's law: the joint law of the first three tokens against exact enumeration.

Vocabulary 6, 20,000 rows as one batch, chi-square at 1e-4 on fixed seeds. The first token comes from the prefill and a
draft never takes the last, so one more is generated. Drafters that report a wrong law must fail the same test.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from scipy.stats import chisquare
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, MistralConfig, MistralForCausalLM
from transformers.generation import logits_process as lp

from hf_specdraft import families, verification
from hf_specdraft.draft import Draft, Law, Verdict
from hf_specdraft.drafters import Drafter, DrafterConfig, Session
from hf_specdraft.drafters.assistant import AssistantDrafter
from hf_specdraft.rows import Rows
from hf_specdraft.trees import prune
from hf_specdraft.verifier import Verifier

V = 6
ROWS = 20_000
TOKENS = 3
PROMPT = (1, 4, 1, 1)


@cache
def target(kind: str = "llama"):
    if kind == "llama":
        return tiny_llama(vocab=V)
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=4,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return MistralForCausalLM(config).eval()


class EveryOther(LogitsProcessor):
    """A user's own processor, which reads the prefix: after an even token, odd ones lose 1."""

    def __call__(self, input_ids, scores):
        return scores - (torch.arange(scores.shape[-1]) % 2) * (input_ids[:, -1:] % 2 == 0)


@dataclass(frozen=True)
class Request:
    """Settings of generate, and the processors that plain generate makes of them, in its order. The temperature evens
    out the laws of a random target, which would otherwise give few different texts."""

    settings: dict[str, Any]
    processors: list

    def __hash__(self):
        return id(self)


WARM = lp.TemperatureLogitsWarper(4.0)
OWN = LogitsProcessorList([EveryOther()])
REQUESTS = {
    "temperature": Request(dict(temperature=4.0, top_k=0), [WARM]),
    "top_k": Request(dict(temperature=4.0, top_k=3), [WARM, lp.TopKLogitsWarper(3)]),
    "top_p": Request(dict(temperature=4.0, top_k=0, top_p=0.8), [WARM, lp.TopPLogitsWarper(0.8)]),
    "all_warpers": Request(
        dict(temperature=4.0, top_k=5, top_p=0.9), [WARM, lp.TopKLogitsWarper(5), lp.TopPLogitsWarper(0.9)]
    ),
    "penalty": Request(
        dict(temperature=4.0, top_k=0, repetition_penalty=1.3), [lp.RepetitionPenaltyLogitsProcessor(1.3), WARM]
    ),
    "penalty_and_top_p": Request(
        dict(temperature=4.0, top_k=0, top_p=0.8, repetition_penalty=1.3),
        [lp.RepetitionPenaltyLogitsProcessor(1.3), WARM, lp.TopPLogitsWarper(0.8)],
    ),
    "own_processor": Request(
        dict(temperature=4.0, top_k=4, logits_processor=OWN), [*OWN, WARM, lp.TopKLogitsWarper(4)]
    ),
}
# Prefix-free processors, and one that makes every position depend on the tokens before it (in slow runs, and once for
# every rule in fast ones).
both_kinds = pytest.mark.parametrize("request_name", ["all_warpers", pytest.param("penalty", marks=pytest.mark.slow)])


@cache
def exact_law(request_name: str, kind: str = "llama", prompt: tuple[int, ...] = PROMPT) -> Tensor:
    """[V, V, V] float64 law of the first three tokens, from the target's logits after every possible prefix."""
    law = torch.ones(1, dtype=torch.float64)
    prefixes = torch.tensor([prompt])
    for _ in range(TOKENS):
        with torch.no_grad():
            scores = target(kind)(prefixes).logits[:, -1].float()
        for processor in REQUESTS[request_name].processors:
            scores = processor(prefixes, scores)
        law = (law[:, None] * scores.double().softmax(-1)).flatten()
        prefixes = torch.cat([prefixes.repeat_interleave(V, 0), torch.arange(V).repeat(len(prefixes))[:, None]], 1)
    return law.view(V, V, V)


def p_value(tokens: Tensor, law: Tensor) -> float:
    """Of the chi-square test that tokens [R, 3] were drawn from `law`; 0 if an impossible text was drawn. Cells that
    expect fewer than 5 are taken together."""
    cells = (tokens * torch.tensor([V * V, V, 1])).sum(1)
    observed = torch.bincount(cells, minlength=V**TOKENS).double()
    expected = law.flatten() * len(tokens)
    if bool(observed[law.flatten() == 0].any()):
        return 0.0
    rare = expected < 5
    observed, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (observed, expected))
    some = expected > 0
    return float(chisquare(observed[some].numpy(), (expected[some] * (observed.sum() / expected.sum())).numpy()).pvalue)


def draw(drafter, request_name: str, kind: str = "llama", prompts=(PROMPT,), **settings):
    """The output for ROWS rows, the prompts in turn."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    torch.manual_seed(1234)
    return target(kind).generate(
        ids,
        attention_mask=mask,
        do_sample=True,
        num_return_sequences=ROWS // len(prompts),
        max_new_tokens=TOKENS + 1,
        assistant_model=drafter,
        **{"return_dict_in_generate": True, **REQUESTS[request_name].settings, **settings},
    )


def assert_fits(drafter, request_name: str):
    """The drafter's output has the target's law, with some drafts accepted and some not; returns the statistics."""
    out = draw(drafter, request_name)
    assert p_value(out.sequences[:, len(PROMPT) :][:, :TOKENS], exact_law(request_name)) > 1e-4
    assert 0 < out.speculation.accepted < out.speculation.verified
    return out.speculation


def assert_misfits(drafter, request_name: str):
    """The same test notices a wrong law."""
    out = draw(drafter, request_name)
    assert p_value(out.sequences[:, len(PROMPT) :][:, :TOKENS], exact_law(request_name)) < 1e-6


# ---- drafters with a law of their own ----


class MarkovConfig(DrafterConfig):
    model_type = "specdraft_markov"
    policy: str = "fixed"


class Markov(Drafter):
    """Drafts from a law of its own, q(token | token before), by a `propose(q table [V, V], context) -> Draft`."""

    config_class = MarkovConfig

    def __init__(self, propose, depth=3, nodes=0, sharpness=1.5, **fields):
        super().__init__(MarkovConfig(num_assistant_tokens=depth, tree_nodes=nodes, **fields))
        self.propose = propose
        self.scores = sharpness * torch.randn(V, V, generator=torch.Generator().manual_seed(7))

    def start(self, view, batch):
        return MarkovSession(self)


class MarkovSession(Session):
    def __init__(self, drafter):
        self.drafter = drafter

    def propose(self, context):
        return self.drafter.propose(self.drafter.scores, context)

    def observe(self, commit):
        pass

    def keep(self, rows):
        pass


def multinomial(law: Tensor) -> Tensor:
    return torch.multinomial(law, 1)[:, 0]


def argmax(law: Tensor) -> Tensor:
    return law.argmax(-1)


def chain(choose=multinomial, reports=True, warped=True, every=1) -> Any:
    """A chain whose tokens `choose` takes from the warped law. reports: whether it says that they were drawn from that
    law (of every `every`-th row only). warped: whether the law it reports is the warped one."""

    def propose(scores, context):
        token, depth = context.anchor, max(context.lengths)
        tokens, laws = [], []
        for _ in range(depth):
            law = context.warp(scores[token]).softmax(-1)
            token = choose(law)
            laws.append(law if warped else scores[tokens[-1] if tokens else context.anchor].softmax(-1))
            tokens.append(token)
        drawn = torch.arange(len(context.lengths)) % every == 0
        law = Law(torch.stack(laws, 1), None, drawn) if reports and depth else None
        return Draft.chain(torch.stack(tokens, 1), context.lengths, law=law)

    return propose


def cut_below(threshold: float, demote: bool) -> Any:
    """A drawn chain that drops tokens drawn with less probability than `threshold`: a cut that looked at the token."""

    def propose(scores, context):
        draft = chain()(scores, context)
        confidence = draft.law.probs.gather(-1, draft.tokens[..., None])[..., 0]
        cut = prune(draft, confidence >= threshold, looked_at_token=True)
        if not demote:
            cut = replace(cut, law=replace(draft.law, probs=draft.law.probs[:, : cut.shape[1]]))
        return cut

    return propose


def tree(replacement: bool, claims: bool | None = None, width: int = 2, drawn=True) -> Any:
    """A full tree of `width` children per node, drawn with or without replacement. claims: what it says it did."""

    def propose(scores, context):
        if not context.tree:
            return chain()(scores, context)
        batch, depth = len(context.lengths), max(context.lengths)
        tokens, laws, parents = [], [], []
        level = [(-1, context.anchor)]
        for _ in range(depth):
            below = []
            for parent, token in level:
                law = context.warp(scores[token]).softmax(-1)
                if not drawn:
                    children = law.topk(width).indices
                elif replacement:
                    children = torch.multinomial(law, width, replacement=True)
                else:
                    # The last token of a law that has run out may be any: a child that the law gives no chance.
                    children = torch.multinomial(law.clamp(min=1e-30), width)
                for child in children.unbind(1):
                    below.append((len(tokens), child))
                    tokens.append(child)
                    laws.append(law)
                    parents.append(parent)
            level = below
        law = Law(
            torch.stack(laws, 1),
            None,
            torch.ones(batch, dtype=torch.bool),
            claims if claims is not None else replacement,
        )
        valid = torch.ones(batch, len(tokens), dtype=torch.bool) & (torch.tensor(context.lengths) > 0)[:, None]
        return Draft(torch.stack(tokens, 1), torch.tensor(parents).repeat(batch, 1), valid, law=law if drawn else None)

    return propose


def fixed(*paths: tuple[int, ...]) -> Any:
    """The same paths whatever the context, merged into a tree: a scripted point draft."""
    known = {path[: n + 1] for path in paths for n in range(len(path))}
    nodes = sorted(known, key=lambda path: (len(path), path))
    parents = [nodes.index(path[:-1]) if len(path) > 1 else -1 for path in nodes]

    depths = torch.tensor([len(path) for path in nodes])

    def propose(scores, context):
        batch, asked = len(context.lengths), int((depths <= max(context.lengths)).sum())  # the shallowest come first
        tokens = torch.tensor([path[-1] for path in nodes[:asked]]).repeat(batch, 1)
        valid = depths[:asked] <= torch.tensor(context.lengths)[:, None]
        return Draft(tokens, torch.tensor(parents[:asked]).repeat(batch, 1), valid)

    return propose


DRAFTERS = {
    "scripted chain": lambda: Markov(fixed((3, 1, 4))),
    "scripted tree": lambda: Markov(fixed((3, 1, 4), (3, 5, 0), (0, 2), (5,)), nodes=8),
    "argmax chain": lambda: Markov(chain(argmax, reports=False)),
    "top-2 tree": lambda: Markov(tree(True, drawn=False), nodes=14),
    "drawn chain, rule E": lambda: Markov(chain()),
    "drawn chain, rule A": lambda: Markov(chain(), verification="token"),
    "drawn and point rows mixed": lambda: Markov(chain(every=2)),
    "drawn chain treated as chosen": lambda: Markov(chain(reports=False)),
    "drawn chain cut by own confidence": lambda: Markov(cut_below(0.3, demote=True)),
    "siblings with replacement": lambda: Markov(tree(True), nodes=14),
    "siblings without replacement": lambda: Markov(tree(False), nodes=14),
    "three siblings without replacement": lambda: Markov(tree(False, width=3), depth=2, nodes=12),
}


PREFIXED = ("scripted tree", "drawn chain, rule E", "siblings without replacement")


@pytest.mark.parametrize(
    "drafter, request_name",
    [(name, "all_warpers") for name in DRAFTERS]
    + [pytest.param(name, "penalty", marks=[pytest.mark.slow] * (name not in PREFIXED)) for name in DRAFTERS],
)
def test_own_laws(drafter, request_name):
    """Field cases 5 and 6."""
    assert_fits(DRAFTERS[drafter](), request_name)


@pytest.mark.slow
def test_a_penalty_under_a_nucleus():
    """What the nucleus holds then depends on the tokens before it."""
    assert_fits(DRAFTERS["drawn chain, rule E"](), "penalty_and_top_p")


def test_temperature_alone():
    """Rule A then goes through the fused kernel. Rule E accepts more."""
    by_block, by_token = (assert_fits(DRAFTERS[f"drawn chain, rule {rule}"](), "temperature").accepted for rule in "EA")
    assert by_block > by_token


@pytest.mark.slow
@pytest.mark.parametrize("request_name", ["top_k", "top_p", "own_processor"])
@pytest.mark.parametrize("drafter", ["drawn chain, rule E", "siblings without replacement"])
def test_other_processors(drafter, request_name):
    assert_fits(DRAFTERS[drafter](), request_name)


def test_plain_generate_fits():
    """The enumeration is right, whatever we do."""
    for name in REQUESTS:
        out = draw(None, name)
        assert p_value(out.sequences[:, len(PROMPT) :][:, :TOKENS], exact_law(name)) > 1e-4


def test_a_drafter_with_the_targets_law_is_always_right():
    """p = q but for rounding, with which some rejections come: their residual must not be NaN (field case 10)."""
    drafter = AssistantDrafter.from_model(target(), policy="fixed", num_assistant_tokens=3)
    out = draw(drafter, "all_warpers")
    assert p_value(out.sequences[:, len(PROMPT) :][:, :TOKENS], exact_law("all_warpers")) > 1e-4
    assert out.speculation.acceptance > 0.9999


# ---- the families ----


def family_drafter(name: str, **fields):
    family = families()[name]
    torch.manual_seed(5)
    return family(family.config_class.tiny(policy="fixed", num_assistant_tokens=3, vocab_size=V, **fields)).eval()


FAMILIES = {
    f"{name.removeprefix('specdraft_')} {form}": (name, dict(tree_nodes=6 if form == "tree" else 0))
    for name in sorted(families())
    for form in ("chain", "tree")
}
BLOCK = dict(mask_token_id=5, draft_vocab_size=4)
FAMILIES |= {
    "block point chain": ("specdraft_block", dict(tree_nodes=0, draft_sampling=False)),
    "assistant greedy": ("specdraft_assistant", dict(draft_sampling=False)),
    "assistant with a confidence stop": ("specdraft_assistant", dict(confidence_threshold=0.3)),
    "assistant by rule A": ("specdraft_assistant", dict(verification="token")),
}


@both_kinds
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, request_name):
    """Field case 7."""
    name, fields = FAMILIES[family]
    assert_fits(family_drafter(name, **(BLOCK if name == "specdraft_block" else {}), **fields), request_name)


# ---- requests that change the course of a row ----


@pytest.mark.parametrize("drafter", ["drawn chain, rule E", "siblings without replacement"])
@both_kinds
def test_padded_rows_of_two_prompts(drafter, request_name):
    """Rows of unequal length that are re-aligned every round, on a window shorter than the text."""
    kind = "mistral"
    two = (PROMPT, (3, 3, 1, 0, 2, 4, 1))
    new = draw(DRAFTERS[drafter](), request_name, kind, two).sequences[:, 7:][:, :TOKENS]
    for i, prompt in enumerate(two):
        rows = new[i * ROWS // 2 : (i + 1) * ROWS // 2]
        assert p_value(rows, exact_law(request_name, kind, prompt)) > 1e-4


@pytest.mark.parametrize("drafter", ["drawn chain, rule E", "drawn chain, rule A", "siblings with replacement"])
def test_rows_that_end_early(drafter):
    """An end token inside drafts: rows end and leave at different rounds, and the law of the texts stays."""
    end = 2
    out = draw(DRAFTERS[drafter](), "temperature", eos_token_id=end, return_dict_in_generate=False)
    new = out[:, len(PROMPT) :][:, :TOKENS]
    law = exact_law("temperature")
    # After the end come pads: all continuations fall together.
    stopped = law.clone()
    stopped[:, end] = 0
    stopped[:, end, 0] = law[:, end].sum(-1)
    stopped[end] = 0
    stopped[end, 0, 0] = law[end].sum()
    assert p_value(new, stopped) > 1e-4


def test_an_impossible_token_never_comes():
    """Field case 8: p gives token 3 nothing, q gives it everything."""
    drafter = Markov(chain(lambda law: torch.full((len(law),), 3)))
    drafter.scores = torch.full((V, V), -torch.inf).index_fill_(1, torch.tensor([3]), 0.0)
    for fields in ({}, {"verification": "token"}):
        drafter.config.update(fields)
        out = draw(drafter, "temperature", suppress_tokens=[3])
        assert out.speculation.verified > ROWS and out.speculation.accepted == 0
        assert not bool((out.sequences[:, len(PROMPT) :] == 3).any())


# ---- wrong laws: the test must notice ----


WRONG = {
    "soft scores for argmax tokens": lambda: Markov(chain(argmax)),
    "soft scores for argmax tokens, rule A": lambda: Markov(chain(argmax), verification="token"),
    "unsure tokens dropped": lambda: Markov(cut_below(0.3, demote=False)),
    "unwarped scores reported": lambda: Markov(chain(warped=False)),
    "without replacement, claimed with": lambda: Markov(tree(False, claims=True), nodes=14, sharpness=6.0),
    "with replacement, claimed without": lambda: Markov(tree(True, claims=False), nodes=14, sharpness=6.0),
}


@pytest.mark.parametrize("drafter", WRONG)
def test_wrong_laws_are_noticed(drafter):
    """Field cases 5 and 6, and a cut that looks at its token without saying so."""
    assert_misfits(WRONG[drafter](), "temperature")


def accept_everything(monkeypatch):
    """Field case 8: every drafted token passes."""
    verify = Verifier.__call__

    def accept_all(self, draft, logits, active):
        verdict = verify(self, draft, logits, active)
        return Verdict(torch.arange(draft.shape[1]).where(draft.valid, -1), draft.valid.sum(1), verdict.next_token)

    monkeypatch.setattr(Verifier, "__call__", accept_all)


def no_residual(monkeypatch):
    """A correction drawn from p instead of the residual."""
    monkeypatch.setattr(verification, "residual", lambda p, q: p)


def wrong_row(monkeypatch):
    """A token judged by the law one position further on."""
    row_at = Verifier._row_at

    def next_row(self, logits, index, alive=None):
        return row_at(self, logits, (index + 1).clamp(max=logits.shape[1] - 1))

    monkeypatch.setattr(Verifier, "_row_at", next_row)


@pytest.mark.parametrize("fault", [accept_everything, no_residual, wrong_row])
def test_wrong_verification_is_noticed(monkeypatch, fault):
    # Drawn and point rows mixed go through `walk`, which the faults are in.
    fault(monkeypatch)
    assert_misfits(DRAFTERS["drawn and point rows mixed"](), "all_warpers")


@pytest.mark.parametrize(
    "request_name", ["penalty", pytest.param("penalty_and_top_p", marks=pytest.mark.slow), "own_processor"]
)
def test_processors_that_see_the_prompt_only_are_noticed(monkeypatch, request_name):
    """Field case 30 in sampling: the penalty is computed without the drafted tokens."""
    monkeypatch.setattr(Rows, "prefix", lambda self, row, ahead=(): self.prompt[row])
    assert_misfits(DRAFTERS["drawn chain, rule E"](), request_name)
