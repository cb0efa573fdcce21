"""Speculative decoding for transformers: any drafter, any batch, exactly lossless.

    import hf_specdraft
    drafter = hf_specdraft.AutoDrafter.from_pretrained("z-lab/Qwen3-8B-DFlash-b16")
    out = target.generate(**inputs, assistant_model=drafter, max_new_tokens=512)
"""

from .integration import disable, enable, speculate
from .drafters import AutoDrafter, Drafter, DrafterConfig, families
from .speculation import Speculation

__version__ = "0.1.0"
__all__ = [
    "AutoDrafter",
    "Drafter",
    "DrafterConfig",
    "Speculation",
    "disable",
    "enable",
    "families",
    "speculate",
]

enable()
