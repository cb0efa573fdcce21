"""Speculative decoding for transformers: any drafter, any batch, exactly lossless."""

__version__ = "0.1.0"
