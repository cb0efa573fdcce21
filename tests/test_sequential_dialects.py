"""Published DSpark and Domino checkpoints: what their own projects computed with them, what is refused, and exports."""

import json
import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_dialects import FIXTURES, golden
from transformers import AutoModelForCausalLM

from hf_specdraft.confidence import factors
from hf_specdraft.draft import Commit, Context, Features
from hf_specdraft.drafters import AutoDrafter, TargetView
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.block.dialects import dialect_of
from hf_specdraft.publishing import export
from hf_specdraft.training.records import Unrolled
from hf_specdraft.trees import prune

DRAFTERS = [
    "dspark-deepspec/drafter",
    "dspark-deepspec/drafter-gated",
    "dspark-deepspec/drafter-rnn",
    "dspark-specforge/drafter-gated",
    "dspark-speculators/drafter",
    "domino-specforge/drafter",
    "domino-specforge/drafter-noshift",
]
# The loop that made SpecForge's texts reads other slots than its training: its drafts are ours in its contexts only.
OWN_LOOP = [name for name in DRAFTERS if not name.startswith("dspark-specforge")]


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "dflash-target", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The published folders whole: the fixtures lack what is the target's, and the gated heads are a file apart."""
    folder, lent = tmp_path_factory.mktemp("published"), load_file(FIXTURES / "dflash-target" / "model.safetensors")
    for name in DRAFTERS:
        is_gated = name == "dspark-deepspec/drafter-gated"
        source = FIXTURES / (name.removesuffix("-gated") if is_gated else name)
        shutil.copytree(source, folder / name)
        config, state = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
        if is_gated:
            config["markov_head_type"] = "gated"
            state |= load_file(FIXTURES / "dspark-deepspec" / "heads-gated.safetensors")
        if "specforge" not in name:
            state = {"embed_tokens.weight": lent["model.embed_tokens.weight"], **state}
            state = {"lm_head.weight": lent["lm_head.weight"], **state}
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(state, folder / name / "model.safetensors", metadata={"format": "pt"})
    return folder


@cache
def truth(prompt: tuple[int, ...]) -> tuple[list[int], tuple[torch.Tensor, ...]]:
    """The target's greedy text behind a prompt, and all its hidden states."""
    model = AutoModelForCausalLM.from_pretrained(FIXTURES / "dflash-target", dtype=torch.float32).eval()
    text = model.generate(torch.tensor([prompt]), do_sample=False, min_new_tokens=56, max_new_tokens=56)
    return text[0].tolist(), model(text, output_hidden_states=True).hidden_states


class Walk:
    """Speculative decoding at its plainest: the greedy text is known, and drafts are compared with it.

    cut: verify only the drafts before the first whose own confidence is below it.
    """

    def __init__(self, target, drafter, prompt: list[int], cut: float | None = None):
        self.text, states = truth(tuple(prompt))
        self.states = torch.cat([states[layer + 1] for layer in drafter.feature_layers], -1)
        self.session, self.cut = drafter.start(TargetView(target), 1), cut
        self.count, self.anchor = min(7, drafter.config.num_drafts), 0
        self.go_on(len(prompt))

    def go_on(self, count: int) -> None:
        old, self.anchor = self.anchor, self.anchor + count
        features = Features(self.states[:, old : self.anchor], [count], [old])
        self.session.observe(Commit([self.text[old + 1 : self.anchor + 1]], features))

    def round(self, advance: int | None = None):
        """A draft, and how many of it are accepted. advance: go on as if that many were."""
        anchor = torch.tensor(self.text[self.anchor : self.anchor + 1])
        draft = self.session.propose(Context(anchor, [self.anchor], [self.count], self.count))
        if self.cut is not None:
            draft = prune(draft, (factors(draft) >= self.cut).cumprod(1).bool(), looked_at_token=False)
        right = draft.tokens[0] == torch.tensor(self.text[self.anchor + 1 :])[: draft.shape[1]]
        accepted = int(right.long().cumprod(0).sum())
        self.go_on((accepted if advance is None else advance) + 1)
        return draft, accepted


@pytest.mark.parametrize("prompt", "ab")
@pytest.mark.parametrize("name", OWN_LOOP)
def test_drafts_acceptance_text_and_confidence_equal_the_projects_own(name, prompt, place, target):
    drafter, gold = AutoDrafter.from_pretrained(place / name), golden(name, prompt)
    with torch.no_grad():
        walk = Walk(target, drafter, gold["prompt"].tolist())
        for r, accepted in enumerate(gold["accepted"].tolist()):
            draft, ours = walk.round()
            assert draft.tokens[0].tolist() == gold["draft_ids"][r].tolist() and ours == accepted
            if f"round{r}.confidence" in gold:
                torch.testing.assert_close(
                    draft.evidence.confidence[0], gold[f"round{r}.confidence"], atol=1e-4, rtol=0
                )
    output = gold["output"].tolist()
    assert walk.text[: len(output)] == output and walk.anchor >= len(output) - 2


@pytest.mark.parametrize("prompt", "ab")
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in OWN_LOOP])
def test_drafts_and_confidence_in_the_projects_own_contexts(name, prompt, place, target):
    drafter, gold = AutoDrafter.from_pretrained(place / name), golden(name, prompt)
    with torch.no_grad():
        walk = Walk(target, drafter, gold["prompt"].tolist())
        for r, (advance, accepted) in enumerate(zip(gold["loop_accepted"].tolist(), gold["accepted"].tolist())):
            draft, ours = walk.round(advance)
            assert draft.tokens[0].tolist() == gold["draft_ids"][r].tolist() and ours == accepted
            if f"round{r}.confidence" in gold:
                torch.testing.assert_close(
                    draft.evidence.confidence[0], gold[f"round{r}.confidence"], atol=1e-4, rtol=0
                )
    assert sum(gold["accepted"]) > sum(gold["loop_accepted"])  # what the other slots lose


@pytest.mark.parametrize("prompt", "ab")
@pytest.mark.parametrize("name", DRAFTERS)
def test_logits_equal_the_projects_own(name, prompt, place, target):
    """The marginals, and corrected along the greedy draft."""
    drafter, gold = AutoDrafter.from_pretrained(place / name), golden(name, prompt)
    first = drafter.config.first_slot if name.startswith("domino") else 0
    with torch.no_grad():
        draft, _ = Walk(target, drafter, gold["prompt"].tolist()).round()
        block, slots = draft.evidence, draft.shape[1]
        previous = torch.cat((block.anchor[:, None], draft.tokens[:, :-1]), 1)
        unrolled = Unrolled(block.hidden, draft.tokens, draft.tokens, draft.tokens > -1, block.anchor, previous)
        corrected = drafter.corrector.teach(drafter, TargetView(target), unrolled, block.logits).logits
    torch.testing.assert_close(block.hidden[0], gold["round0.hidden"][first:][:slots], atol=1e-4, rtol=0)
    torch.testing.assert_close(block.logits[0], gold["round0.base"][first:][:slots], atol=1e-4, rtol=0)
    torch.testing.assert_close(corrected[0], gold["round0.logits"][first:][:slots], atol=1e-4, rtol=0)
    assert (corrected - block.logits).abs().max() > 0.1


@pytest.mark.parametrize("prompt", "ab")
@pytest.mark.parametrize("name", [name for name in DRAFTERS if name.startswith("dspark-deepspec")])
def test_a_cut_by_confidence_equals_the_projects_own(name, prompt, place, target):
    drafter, gold = AutoDrafter.from_pretrained(place / name), golden(name, prompt)
    with torch.no_grad():
        walk = Walk(target, drafter, gold["prompt"].tolist(), cut=0.5)
        for length, accepted in zip(gold["cut.lengths"].tolist(), gold["cut.accepted"].tolist()):
            draft, ours = walk.round()
            assert (draft.shape[1], ours) == (length, accepted)
    output = gold["cut.output"].tolist()
    assert walk.text[: len(output)] == output and walk.anchor >= len(output) - 2


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_head_tensor_acts(name, place, target):
    drafter, view = AutoDrafter.from_pretrained(place / name), TargetView(target)
    with torch.no_grad():
        draft, _ = Walk(target, drafter, golden(name, "a")["prompt"].tolist()).round()
        block = draft.evidence
        previous = torch.cat((block.anchor[:, None], draft.tokens[:, :-1]), 1)
        unrolled = Unrolled(block.hidden, draft.tokens, draft.tokens, draft.tokens > -1, block.anchor, previous)

        def says():
            logits = drafter.corrector.teach(drafter, view, unrolled, block.logits).logits
            if drafter.confidence is None:
                return logits
            sure = drafter.confidence(drafter, view, block.hidden, previous)
            return torch.cat((logits, sure[..., None]), -1)

        before = says()
        for key, tensor in drafter.named_parameters():
            if key.startswith(("corrector.", "confidence.")):
                old = tensor.clone()
                tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
                assert (says() - before).abs().max() > 1e-3, key
                tensor.copy_(old)


def edited(folder, out, config=(), nested=(), rename=lambda key: key):
    """A copy of a folder with config keys set (or, by None, deleted) and tensors renamed."""
    shutil.copytree(folder, out)
    values = json.loads((out / "config.json").read_text())
    for part, changes in ((values, dict(config)), (values.get("dflash_config"), dict(nested))):
        for key, value in changes.items():
            part.pop(key, None) if value is None else part.update({key: value})
    (out / "config.json").write_text(json.dumps(values))
    state = {rename(key): value for key, value in load_file(out / "model.safetensors").items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    return out


def assert_same(one, other):
    assert one.config.to_diff_dict() == other.config.to_diff_dict()
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


HEADS = ("markov_head", "confidence_head", "prefix_gru", "embed_proj")


@pytest.mark.parametrize("name", ["dspark-specforge/drafter-gated", "domino-specforge/drafter"])
def test_older_files_put_the_heads_behind_a_prefix(name, place, tmp_path):
    old = edited(
        place / name, tmp_path / "old", rename=lambda key: f"logit_head.{key}" if key.startswith(HEADS) else key
    )
    assert_same(AutoDrafter.from_pretrained(old), AutoDrafter.from_pretrained(place / name))


def test_the_form_normalised_for_serving(place, tmp_path):
    source = place / "dspark-specforge/drafter-gated"
    nested = json.loads((source / "config.json").read_text())["dflash_config"]
    lifted = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    served = edited(
        source,
        tmp_path / "served",
        config={"architectures": ["Qwen3DSparkModel"], "auto_map": None, **{key: nested[key] for key in lifted}},
        nested=dict.fromkeys((*lifted, "projector_type", "confidence_head_alpha", "attention_mode")),
    )
    assert dialect_of(json.loads((served / "config.json").read_text())) == "z-lab"
    assert_same(AutoDrafter.from_pretrained(served), AutoDrafter.from_pretrained(source))


def test_a_head_in_another_order_than_the_vocabularys(place, tmp_path):
    """speculators' d2t may be in any order, and the Markov head's rows go with it."""
    source = place / "dspark-speculators/drafter"
    other = edited(source, tmp_path / "other")
    state = load_file(other / "model.safetensors")
    order = torch.randperm(len(state["d2t"]), generator=torch.Generator().manual_seed(0))
    ids = (torch.arange(len(order)) + state["d2t"])[order]
    state["d2t"] = ids - torch.arange(len(order))
    for key in ("lm_head.weight", "markov_head.markov_w2.weight"):
        state[key] = state[key][order].contiguous()
    save_file(state, other / "model.safetensors", metadata={"format": "pt"})
    assert_same(AutoDrafter.from_pretrained(other), AutoDrafter.from_pretrained(source))


def test_dominos_slots_are_read_not_assumed(place, tmp_path):
    unknown = edited(place / "domino-specforge/drafter", tmp_path / "unknown", nested={"shift_label": None})
    with pytest.raises(ValueError, match="lacks 'shift_label'.* pass anchor_drafts=True"):
        AutoDrafter.from_pretrained(unknown)
    told = AutoDrafter.from_pretrained(unknown, anchor_drafts=True)
    assert_same(told, AutoDrafter.from_pretrained(place / "domino-specforge/drafter"))


REFUSALS = {
    "no rank": ("dspark-specforge/drafter-gated", {}, {"markov_rank": None}, "unexpected: .*markov_head"),
    "unknown kind": ("dspark-deepspec/drafter", {"markov_head_type": "lstm"}, {}, "vanilla, gated, rnn, got 'lstm'"),
    "confidence of no head": ("dspark-deepspec/drafter", {"markov_rank": 0}, {}, "with_markov reads a Markov head"),
    "other width": ("dspark-deepspec/drafter", {"confidence_head_with_markov": False}, {}, "mismatched: .*confidence"),
    "no width": ("domino-specforge/drafter", {"emb_dim": None}, {"emb_dim": None}, "emb_dim"),
    "two widths": ("domino-specforge/drafter", {"emb_dim": 25}, {}, "emb_dim"),
    "no prefix": ("domino-specforge/drafter", {}, {"pure_draft_prefix_len": None}, "pure_draft_prefix_len"),
    "unread head key": ("domino-specforge/drafter", {}, {"gru_layers": 2}, "gru_layers"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_what_it_cannot_tell(case, place, tmp_path):
    name, config, nested, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(edited(place / name, tmp_path / "edited", config, nested))


# ---- exports ----


FORMATS = {"dspark-deepspec": "deepspec", "dspark-specforge": "specforge", "dspark-speculators": "speculators"}
FORMATS["domino-specforge"] = "specforge"
SETTINGS = (
    *("architectures", "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("projector_type", "emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label", "sample_from_anchor"),
)


@pytest.mark.parametrize("name", DRAFTERS)
def test_exports_what_their_own_project_wrote(name, place, tmp_path):
    drafter = AutoDrafter.from_pretrained(place / name)
    export(drafter, FORMATS[name.split("/")[0]], tmp_path / "out")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", place / name))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", place / name))
    for key in SETTINGS:
        one, other = ({**config.get("dflash_config", {}), **config}.get(key) for config in (ours, theirs))
        assert one == other, key
    again = AutoDrafter.from_pretrained(tmp_path / "out")
    for field in ("corrector", "confidence", "anchor_drafts", "block_size", "draft_vocab_size"):
        assert getattr(again.config, field) == getattr(drafter.config, field), field


MARKOV, GRU = {"name": "markov", "rank": 4}, {"name": "gru", "rank": 4, "hidden_size": 4}


@pytest.mark.parametrize(
    "dialect, fields, message",
    [
        ("zlab", dict(corrector=GRU), "the corrector 'gru'"),
        ("transformers", dict(corrector=MARKOV), "the corrector 'markov'"),
        ("deepspec", dict(corrector=GRU, anchor_drafts=True), "the corrector 'gru'"),
        ("zlab", dict(confidence={}), "a confidence head"),
        ("specforge", dict(corrector=GRU, confidence={}, anchor_drafts=True), "a confidence head"),
        ("specforge", dict(corrector=MARKOV), "an anchor slot that does not draft"),
        ("specforge", dict(anchor_drafts=True), "an anchor slot that drafts"),
        (
            "deepspec",
            dict(anchor_drafts=True, confidence={"temperatures": [2.0]}),
            "calibrated temperatures of its confidence head",
        ),
    ],
)
def test_refuses_to_write_what_a_format_cannot_say(dialect, fields, message, tmp_path):
    sizes = dict(own_embeddings=False, own_head=False, draft_vocab_size=None, layer_types=None, sliding_window=None)
    drafter = BlockDrafter(BlockConfig.tiny(**sizes, **fields))
    with pytest.raises(ValueError, match=f"cannot express what this drafter has: {message}$"):
        export(drafter, dialect, tmp_path / "out")
