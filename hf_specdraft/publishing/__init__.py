"""A drafter on its way to others: where it comes from, its card, the Hub, and other projects' formats."""

from .cards import measure
from .cards import write as write_card
from .exports import export, export_dialects
from .hub import push
from .provenance import Provenance
from .templates import template_mismatch, template_sha256

__all__ = [
    "Provenance",
    "export",
    "export_dialects",
    "measure",
    "push",
    "template_mismatch",
    "template_sha256",
    "write_card",
]
