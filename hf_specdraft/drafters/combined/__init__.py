"""Copies where the text repeats itself and a network elsewhere, or both in one tree."""

from .configuration_combined import CombinedConfig
from .modeling_combined import CombinedDrafter

__all__ = ["CombinedConfig", "CombinedDrafter"]
