"""No weights: copies what followed the same tokens earlier in the row, in a corpus or in earlier responses."""

from .configuration_ngram import NgramConfig
from .modeling_ngram import NgramDrafter, NgramSession, SharedPool

__all__ = ["NgramConfig", "NgramDrafter", "NgramSession", "SharedPool"]
