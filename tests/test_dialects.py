"""Published DFlash checkpoints: what their own projects computed with them, and what must be refused."""

import json
import shutil

import pytest
import torch
from published import FIXTURES
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_specdraft.draft import Commit, Context, Features
from hf_specdraft.drafters import AutoDrafter, TargetView
from hf_specdraft.drafters.block import BlockDrafter, ContextCache
from hf_specdraft.drafters.block.dialects import dialect_of

DRAFTERS = [
    "dflash-zlab/drafter",
    "dflash-transformers/drafter",
    "dflash-transformers/drafter-sliding",
    "dflash-deepspec/drafter",
    "dflash-speculators/drafter",
    "dflash-speculators/drafter-converted",
]


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "dflash-target", dtype=torch.float32).eval()


def golden(name: str, prompt: str) -> dict[str, torch.Tensor]:
    folder, drafter = name.split("/")
    prefix = f"{drafter}.{prompt}."
    tensors = load_file(FIXTURES / folder / "golden.safetensors")
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def head(drafter, target, hidden):
    logits = drafter.lm_head(hidden) if drafter.config.own_head else target.lm_head(hidden)
    return logits[:, drafter.config.first_slot :]


@pytest.mark.parametrize("prompt", "ab")
@pytest.mark.parametrize("name", DRAFTERS)
def test_states_and_logits_equal_the_projects_own(name, prompt, target):
    drafter, gold = AutoDrafter.from_pretrained(FIXTURES / name), golden(name, prompt)
    view, cache, tokens = TargetView(target), ContextCache(1), gold["output"]
    rounds = [key for key in gold if key.endswith(".features")]
    assert len(rounds) >= 2
    for r in range(len(rounds)):
        features, seen = gold[f"round{r}.features"][None], cache.length
        anchor = seen + features.shape[1]
        ids = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
        ids[0, 0] = tokens[anchor]
        with torch.no_grad():
            out = drafter(
                inputs_embeds=drafter.embed(ids, view),
                features=features,
                feature_positions=torch.arange(seen, anchor)[None],
                position_ids=torch.arange(anchor, anchor + ids.shape[1])[None],
                cache=cache,
            )
            logits = head(drafter, target, out.last_hidden_state)
        torch.testing.assert_close(out.last_hidden_state[0], gold[f"round{r}.hidden"], atol=1e-4, rtol=0)
        if f"round{r}.logits" in gold:
            torch.testing.assert_close(logits[0], gold[f"round{r}.logits"], atol=1e-4, rtol=0)


def decode(target, drafter, prompt: list[int], rounds: int) -> tuple[list[int], list[list[int]], list[int]]:
    """Speculative decoding at its plainest, without a target cache: tokens, drafts and accepted counts per round."""
    session = drafter.start(TargetView(target), 1)
    layers = [layer + 1 for layer in drafter.feature_layers]

    def run(ids):
        out = target(torch.tensor([ids]), output_hidden_states=True)
        return out.logits[0].argmax(-1).tolist(), torch.cat([out.hidden_states[i] for i in layers], -1)

    def tell(new, start, states):
        session.observe(Commit([new], Features(states, [states.shape[1]], [start])))

    choice, states = run(prompt)
    tokens = prompt + [choice[-1]]
    tell(tokens, 0, states)
    drafts, accepted = [], []
    for _ in range(rounds):
        anchor = len(tokens) - 1
        count = drafter.config.num_drafts
        draft = session.propose(Context(torch.tensor([tokens[-1]]), [anchor], [count], count))
        drafts.append(draft.tokens[0].tolist())
        choice, states = run(tokens + drafts[-1])
        choice = choice[anchor:]
        length = next((i for i, token in enumerate(drafts[-1]) if token != choice[i]), count)
        tokens = tokens + choice[: length + 1]
        tell(choice[: length + 1], anchor, states[:, anchor : anchor + length + 1])
        accepted.append(length)
    return tokens, drafts, accepted


@pytest.mark.parametrize("prompt", "ab")
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_acceptance_and_text_equal_the_projects_own(name, prompt, target):
    drafter, gold = AutoDrafter.from_pretrained(FIXTURES / name), golden(name, prompt)
    with torch.no_grad():
        tokens, drafts, accepted = decode(target, drafter, gold["prompt"].tolist(), len(gold["accepted"]))
    assert drafts == gold["draft_ids"].tolist()
    assert accepted == gold["accepted"].tolist()
    # transformers drafts no more when one token is left, which may be the last one here.
    output = gold["output"].tolist()
    assert len(tokens) >= len(output) - 1
    assert tokens[: len(output)] == output[: len(tokens)]


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_tensor_acts(name, target):
    drafter, gold = AutoDrafter.from_pretrained(FIXTURES / name), golden(name, "a")
    view, features = TargetView(target), gold["round0.features"][None]
    count = features.shape[1]
    ids = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
    ids[0, 0] = gold["output"][count]

    def logits():
        out = drafter(
            inputs_embeds=drafter.embed(ids, view),
            features=features,
            feature_positions=torch.arange(count)[None],
            position_ids=torch.arange(count, count + ids.shape[1])[None],
        )
        return head(drafter, target, out.last_hidden_state)

    with torch.no_grad():
        before = logits()
        for key, tensor in drafter.named_parameters():
            old = tensor.clone()
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)) * 0.1)
            assert (logits() - before).abs().max() > 1e-4, key
            tensor.copy_(old)
    assert set(dict(drafter.named_buffers())) <= {"draft_ids", "rotary_emb.inv_freq", "rotary_emb.original_inv_freq"}


def edited(tmp_path, name="dflash-zlab/drafter", config=None, nested=None, drop=(), tensors=None):
    """A copy of a fixture with config keys set (or, by None, deleted) and tensors dropped or replaced."""
    shutil.copytree(FIXTURES / name, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    for part, changes in ((values, config or {}), *((values[key], change) for key, change in (nested or {}).items())):
        for key, value in changes.items():
            part.pop(key, None) if value is None else part.update({key: value})
    (tmp_path / "config.json").write_text(json.dumps(values))
    state = load_file(FIXTURES / name / "model.safetensors")
    state = {key: value for key, value in {**state, **(tensors or {})}.items() if key not in drop}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


Q_PROJ = "layers.0.self_attn.q_proj.weight"
REFUSALS = {
    "unknown key": (dict(config={"output_multiplier": 2.0}), "output_multiplier"),
    "unknown nested key": (dict(nested={"dflash_config": {"selector_rank": 16}}), "selector_rank"),
    "unknown rope key": (dict(config={"rope_scaling": {"rope_type": "yarn", "mrope_section": [1]}}), "mrope_section"),
    "rope depends on length": (dict(config={"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}), "dynamic"),
    "no rope_theta": (dict(config={"rope_theta": None}), "rope_theta"),
    "two rope_thetas": (dict(config={"rope_parameters": {"rope_theta": 5.0}}), "rope_theta is 1000000"),
    "no block_size": (dict(config={"block_size": None}), "block_size"),
    "two block sizes": (dict(nested={"dflash_config": {"block_size": 16}}), "block_size"),
    "no mask id": (dict(nested={"dflash_config": {"mask_token_id": None}}), "mask_token_id"),
    "no layer ids": (dict(nested={"dflash_config": {"target_layer_ids": None}}), "target_layer_ids"),
    "causal": (dict(nested={"dflash_config": {"causal": True}}), "causal"),
    "mlp bias": (dict(config={"mlp_bias": True}), "mlp_bias"),
    "DFlash 2": (dict(config={"architectures": ["DFlash2DraftModel"]}), "DFlash 2"),
    "no head of Domino's": (dict(nested={"dflash_config": {"projector_type": "domino"}}), "emb_dim"),
    "other projector": (dict(nested={"dflash_config": {"projector_type": "mlp"}}), "projector_type"),
    "Markov head": (dict(name="dflash-deepspec/drafter", config={"markov_rank": 16}), "missing: corrector.markov"),
    "confidence head": (
        dict(name="dflash-deepspec/drafter", config={"enable_confidence_head": True}),
        "missing: confidence",
    ),
    "DSpark of speculators": (
        dict(name="dflash-speculators/drafter", config={"speculators_model_type": "dspark"}),
        "algorithm = 'dflash' is not supported",
    ),
    "unknown network key": (
        dict(name="dflash-speculators/drafter", nested={"transformer_layer_config": {"qk_clip": 1}}),
        "qk_clip",
    ),
    "window of unknown meaning": (
        dict(
            config={
                "rope_theta": None,
                "rope_scaling": None,
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 12,
            }
        ),
        "sliding_rule",
    ),
    "sliding without layer_types": (
        dict(config={"use_sliding_window": True, "sliding_window": 12, "layer_types": None}),
        "layer_types",
    ),
    "sliding without window": (dict(config={"layer_types": ["sliding_attention", "full_attention"]}), "sliding_window"),
    "missing tensor": (dict(drop=["hidden_norm.weight"]), "missing: hidden_norm.weight"),
    "missing head": (dict(name="dflash-deepspec/drafter", drop=["lm_head.weight"]), "missing: lm_head.weight"),
    "missing embedding": (dict(name="dflash-speculators/drafter", drop=["embed_tokens.weight"]), "embed_tokens.weight"),
    "renamed tensor": (
        dict(drop=[Q_PROJ], tensors={"layers.0.attn.q_proj.weight": torch.ones(64, 64)}),
        "layers.0.attn.q_proj.weight",
    ),
    "unread tensor": (dict(tensors={"markov_head.weight": torch.ones(2)}), "unexpected: markov_head.weight"),
    "NaN": (dict(tensors={Q_PROJ: torch.full((64, 64), float("nan"))}), f"not finite: {Q_PROJ}"),
    "infinity": (dict(tensors={"norm.weight": torch.full((64,), float("inf"))}), "not finite: norm.weight"),
    "no d2t": (dict(name="dflash-speculators/drafter", drop=["d2t", "t2d"]), "d2t"),
    "d2t out of range": (
        dict(name="dflash-speculators/drafter", tensors={"d2t": torch.full((320,), 400)}),
        "d2t does not map",
    ),
    "d2t against t2d": (
        dict(name="dflash-speculators/drafter", tensors={"t2d": torch.ones(512, dtype=torch.bool)}),
        "d2t and t2d",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_what_it_cannot_tell(case, tmp_path):
    changes, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(edited(tmp_path, **changes))


def test_refuses_a_tensor_of_the_wrong_shape(tmp_path):
    with pytest.raises(ValueError, match="mismatched: .*fc.weight"):
        AutoDrafter.from_pretrained(edited(tmp_path, tensors={"fc.weight": torch.ones(64, 128)}))


def test_refuses_other_formats_than_safetensors(tmp_path):
    edited(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors"):
        AutoDrafter.from_pretrained(tmp_path)


def test_block_size_is_read_from_either_place(tmp_path):
    nested = edited(tmp_path, config={"block_size": None}, nested={"dflash_config": {"block_size": 6}})
    assert AutoDrafter.from_pretrained(nested).config.block_size == 6
    assert AutoDrafter.from_pretrained(FIXTURES / "dflash-zlab/drafter").config.block_size == 8


def test_rope_in_either_style_gives_the_same_angles(tmp_path):
    scaling = {"type": "linear", "factor": 2.0}
    old = edited(tmp_path / "old", config={"rope_scaling": scaling, "partial_rotary_factor": 0.5})
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000000, "partial_rotary_factor": 0.5}
    new = edited(tmp_path / "new", config={"rope_theta": None, "rope_scaling": None, "rope_parameters": rope})
    old, new = (AutoDrafter.from_pretrained(folder).rotary_emb.inv_freq for folder in (old, new))
    torch.testing.assert_close(old, new)
    torch.testing.assert_close(old, 1e6 ** (-torch.arange(0, 8, 2) / 8) / 2)


def test_window_semantics_follow_the_dialect(tmp_path):
    slides = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
    both = {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}

    def rule(folder, **kwargs):
        config = AutoDrafter.from_pretrained(folder, **kwargs).config
        return config.sliding_rule, config.sliding_causal

    assert rule(edited(tmp_path / "z-lab", config=slides)) == ("unbounded", False)
    assert rule(edited(tmp_path / "SpecForge", config={**slides, **both})) == ("query", True)
    assert rule(FIXTURES / "dflash-transformers/drafter-sliding") == ("distance", False)
    nested = {"transformer_layer_config": slides}
    speculators = edited(tmp_path / "causal", "dflash-speculators/drafter", nested=nested)
    assert rule(speculators) == ("anchor", True)
    speculators = edited(
        tmp_path / "not", "dflash-speculators/drafter", {"sliding_window_non_causal": True}, nested=nested
    )
    assert rule(speculators) == ("anchor", False)
    # The caller knows better, and can say so where the file does not tell.
    chosen = {"sliding_rule": "query", "sliding_causal": True}
    assert rule(edited(tmp_path / "told", config={**slides, **both, "rope_theta": None}), **chosen) == ("query", True)


def test_speculators_slots_layers_and_vocabulary(tmp_path):
    base = AutoDrafter.from_pretrained(FIXTURES / "dflash-speculators/drafter")
    assert base.feature_layers == (1, 2, 4) and base.config.num_drafts == 7 and len(base.draft_ids) == 320
    # Trained files list the last state, from which labels were taken, behind those that fc reads.
    changes = {"sample_from_anchor": True, "aux_hidden_state_layer_ids": [2, 3, 5, 6]}
    other = AutoDrafter.from_pretrained(edited(tmp_path, "dflash-speculators/drafter", changes))
    assert other.feature_layers == (1, 2, 4) and other.config.num_drafts == 8
    assert other.config.target_name == "target"


def test_deepspec_ties_its_head_when_the_config_says_so(tmp_path):
    folder = edited(tmp_path, "dflash-deepspec/drafter", {"tie_word_embeddings": True}, drop=["lm_head.weight"])
    drafter = AutoDrafter.from_pretrained(folder)
    assert torch.equal(drafter.lm_head.weight, drafter.embed_tokens.weight)


def test_reads_sharded_checkpoints(tmp_path):
    folder = edited(tmp_path)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(state)}
    for shard in set(weight_map.values()):
        save_file({key: state[key] for key in state if weight_map[key] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    loaded = AutoDrafter.from_pretrained(folder).state_dict()
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[key], state[key]) for key in state)


def test_dialects_are_told_apart():
    configs = [json.loads((FIXTURES / name / "config.json").read_text()) for name in DRAFTERS]
    assert [dialect_of(config) for config in configs] == [
        *("z-lab", "transformers", "transformers", "deepspec", "speculators", "speculators")
    ]
    assert BlockDrafter.dialect_of({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}) is None
    assert BlockDrafter.dialect_of({"speculators_model_type": "eagle3"}) is None


def test_loads_in_the_dtype_asked_for():
    drafter = AutoDrafter.from_pretrained(FIXTURES / "dflash-speculators/drafter", dtype=torch.bfloat16)
    assert drafter.dtype == torch.bfloat16 and drafter.draft_ids.dtype == torch.int64
