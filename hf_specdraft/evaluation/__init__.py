"""Measures a drafter against plain generate: the work behind `hf-specdraft check` and `hf-specdraft bench`.

Everything is counted the same way for every method. tau is the mean number of tokens committed per target pass, with
the prefill pass and what that pass committed left out. Our loop and plain generate commit one token in prefill;
transformers' prompt lookup already sends a draft along, so what its first pass committed is read from the cache length
that the second pass finds, and left out as well.
"""

from .benchmark import (
    LOOKUP,
    OVERALL,
    PLAIN,
    Record,
    Row,
    baselines,
    bench,
    interval,
    plot,
    provenance,
    sha256,
    summarise,
    write_json,
)
from .inputs import Prompt, encode, key_value, load_drafter, load_target, read_prompts
from .runs import PassClock, Run, run
from .verdicts import (
    FAULT,
    TIE,
    CheckReport,
    Difference,
    Distance,
    check,
    classify_difference,
    sampling_distance,
)

__all__ = [
    "FAULT",
    "LOOKUP",
    "OVERALL",
    "PLAIN",
    "TIE",
    "CheckReport",
    "Difference",
    "Distance",
    "PassClock",
    "Prompt",
    "Record",
    "Row",
    "Run",
    "baselines",
    "bench",
    "check",
    "classify_difference",
    "encode",
    "interval",
    "key_value",
    "load_drafter",
    "load_target",
    "plot",
    "provenance",
    "read_prompts",
    "run",
    "sampling_distance",
    "sha256",
    "summarise",
    "write_json",
]
