"""What is found by looking: each corrector and each policy leaves the text alone, and stands in its package's table."""

import pytest
import torch
from conftest import tiny_llama
from targets import plain, target
from test_lossless import assert_equals_plain

from hf_specdraft import correctors, policies
from hf_specdraft.drafters.assistant import AssistantDrafter
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter

# Options that a policy cannot do without.
NEEDED = {"speckv": {"lengths": [2]}}


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("name", correctors.known())
def test_correctors(name, tree):
    """With its default options, its weights random, so that they act."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        fields = dict(corrector={"name": name}, policy="fixed", tree_nodes=6 if tree else 0)
        drafter = BlockDrafter(BlockConfig.tiny(**fields)).eval()
        for tensor in drafter.corrector.parameters():
            torch.nn.init.normal_(tensor, std=0.3)
    assert assert_equals_plain(target("llama"), plain("llama"), drafter).verified > 0


def equipped(policy: dict) -> list:
    """Drafters of all the parts that policies ask for."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        parts = dict(confidence={}, length_head={"bottleneck": 8}, predraft={"hidden": 8}, max_stages=2)
        block = BlockDrafter(BlockConfig.tiny(policy=policy, **parts)).eval()
        return [block, AssistantDrafter.from_model(tiny_llama(3), policy=policy, acceptance_head={})]


@pytest.mark.parametrize("name", [*policies.BUILT_IN, *policies.known()])
def test_policies(name):
    """With each drafter that has what it asks for, and one at least. Whether anything pays is the machine's to say."""
    served = 0
    for drafter in equipped({"name": name, **NEEDED.get(name, {})}):
        try:
            assert_equals_plain(target("llama"), plain("llama"), drafter)
            served += 1
        except ValueError as error:
            assert "needs a" in str(error), "which names the part that is missing"
    assert served


@pytest.mark.parametrize("package", [correctors, policies], ids=lambda package: package.__name__)
def test_tables_are_complete(package):
    rows = [line.split("|")[1].strip() for line in package.__doc__.splitlines() if line.startswith("| ")]
    assert sorted(rows) == sorted(["name", "---", *package.known(), *getattr(package, "BUILT_IN", ())])
