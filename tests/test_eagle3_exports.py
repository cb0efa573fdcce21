"""EAGLE-3 drafters in other projects' formats: their own files, written by us."""

import pytest
import torch
from test_dialects import FIXTURES
from test_exports import assert_same_tensors, tensors

from hf_specdraft.drafters import AutoDrafter
from hf_specdraft.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from hf_specdraft.publishing import export

EAGLE3 = {
    "eagle3-safeailab/drafter": "safeailab",
    "eagle3-speculators/drafter": "speculators",
    "eagle3-speculators/drafter-norms": "speculators",
}


def eagle3(**fields) -> Eagle3Drafter:
    """What every format can say, for a target of 8 layers, unless `fields` say otherwise."""
    plain = dict(num_hidden_layers=1, qk_norm=False, fc_norm=False, norm_output=False, target_layer_ids=[1, 3, 4])
    torch.manual_seed(1)
    return Eagle3Drafter(Eagle3Config.tiny(**{**plain, "num_target_layers": 8, **fields})).eval()


@pytest.mark.parametrize("name", EAGLE3)
def test_eagle3_files_are_those_their_own_project_wrote(name, tmp_path):
    drafter = AutoDrafter.from_pretrained(FIXTURES / name)
    export(drafter, EAGLE3[name], tmp_path / "out")
    assert_same_tensors(tensors(tmp_path / "out"), tensors(FIXTURES / name))
    again = AutoDrafter.from_pretrained(tmp_path / "out")
    assert_same_tensors(again.state_dict(), drafter.state_dict())
    for key in Eagle3Config.__dataclass_fields__:
        if key not in ("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "name_or_path"):
            assert getattr(again.config, key) == getattr(drafter.config, key), key


@pytest.mark.parametrize(
    "dialect, fields",
    [
        ("safeailab", dict(own_embeddings=False, draft_vocab_size=None)),
        ("safeailab", dict(target_hidden_size=48, rope_parameters={"rope_type": "default", "rope_theta": 1234.0})),
        ("speculators", dict(qk_norm=True, norm_output=True, target_layer_ids=[-1, 0], num_hidden_layers=2)),
        ("speculators", dict(attention_bias=True, target_hidden_size=48, num_assistant_tokens=2)),
    ],
)
def test_eagle3_round_trip_of_what_fixtures_lack(dialect, fields, tmp_path):
    drafter = eagle3(**fields)
    export(drafter, dialect, tmp_path / "out")
    again = AutoDrafter.from_pretrained(tmp_path / "out")
    assert_same_tensors(again.state_dict(), drafter.state_dict())
    if dialect == "safeailab":  # names no layers: the rule does, once the target's depth is known
        assert again.config.target_layer_ids is None and drafter.config.target_layer_ids == [1, 3, 4]
        again.config.target_layer_ids = drafter.config.target_layer_ids
    for key in ("target_layer_ids", "rope_parameters", "target_hidden_size", "attention_bias", "norm_output"):
        assert getattr(again.config, key) == getattr(drafter.config, key), key


@pytest.mark.parametrize(
    "fields, dialect, message",
    [
        (dict(reads_final=True), "speculators", "reads_final"),
        (dict(draft_head_rank=4), "speculators", "a low-rank head"),
        (dict(own_head=False, draft_vocab_size=None), "safeailab", "stores the head.*give the target"),
        (dict(own_embeddings=False), "speculators", "stores embedding and head.*give the target"),
        (dict(target_layer_ids=[0, 3, 4]), "safeailab", "other than the three"),
        (dict(num_target_layers=None), "safeailab", "other than the three"),
        (dict(num_hidden_layers=2), "safeailab", "more than one layer"),
        (dict(qk_norm=True), "safeailab", "norms of queries and keys"),
        (dict(fc_norm=True), "safeailab", "fc_norm"),
        (dict(), "zlab", "it knows safeailab, speculators"),
    ],
)
def test_eagle3_refuses_what_a_format_cannot_express(fields, dialect, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export(eagle3(**fields), dialect, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
