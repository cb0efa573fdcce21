"""A drafter on its way to others: where it comes from, its card, the Hub, and other projects' formats."""

from .provenance import Provenance, template_sha256

__all__ = ["Provenance", "template_sha256"]
