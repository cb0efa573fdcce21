"""The front door is small, and every name in it is there on purpose."""

import importlib.metadata
import re

import hf_specdraft

NAMES = """
AssistantConfig AssistantDrafter AutoDrafter BlockConfig BlockDrafter CombinedConfig CombinedDrafter Drafter
DrafterConfig Eagle3Config Eagle3Drafter NgramConfig NgramDrafter
Speculation SpeculativeOutput disable enable families speculate
"""


def test_public_names():
    assert sorted(hf_specdraft.__all__) == sorted(NAMES.split())
    assert all(hasattr(hf_specdraft, name) for name in hf_specdraft.__all__)


def test_families_are_found_by_looking():
    assert {"specdraft_assistant", "specdraft_block", "specdraft_ngram"} <= set(hf_specdraft.families())


def test_one_version():
    assert importlib.metadata.version("hf_specdraft") == hf_specdraft.__version__


def test_supported_range_is_the_one_declared():
    from hf_specdraft.integration import OLDEST, TOO_NEW

    (declared,) = (r for r in importlib.metadata.requires("hf_specdraft") if r.startswith("transformers"))
    assert re.findall(r"[\d.]+", declared) in (["5.25", "5.24"], ["5.24", "5.25"])
    assert OLDEST.startswith("5.24") and TOO_NEW.startswith("5.25")
