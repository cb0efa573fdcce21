"""Speculative decoding for transformers: any drafter, any batch, exactly lossless.

Importing the package makes `model.generate(**inputs, assistant_model=drafter)` accept its drafters.
"""

from .decoding import SpeculativeOutput
from .drafters import AutoDrafter, Drafter, DrafterConfig, families
from .drafters.assistant import AssistantConfig, AssistantDrafter
from .drafters.block import BlockConfig, BlockDrafter
from .drafters.combined import CombinedConfig, CombinedDrafter
from .drafters.eagle3 import Eagle3Config, Eagle3Drafter
from .drafters.ngram import NgramConfig, NgramDrafter
from .integration import disable, enable, speculate
from .speculation import Speculation

__version__ = "0.1.0"
__all__ = [
    "AssistantConfig",
    "AssistantDrafter",
    "AutoDrafter",
    "BlockConfig",
    "BlockDrafter",
    "CombinedConfig",
    "CombinedDrafter",
    "Drafter",
    "DrafterConfig",
    "Eagle3Config",
    "Eagle3Drafter",
    "NgramConfig",
    "NgramDrafter",
    "Speculation",
    "SpeculativeOutput",
    "disable",
    "enable",
    "families",
    "speculate",
]

enable()
