"""The DFlash lineage: one pass fills a block of masks, with the target's hidden states as context keys and values."""

from .configuration_block import BlockConfig
from .context_cache import ContextCache
from .modeling_block import BlockDrafter
from .session_block import BlockSession

__all__ = ["BlockConfig", "BlockDrafter", "BlockSession", "ContextCache"]
