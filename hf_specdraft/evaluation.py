"""Measures a drafter against plain generate: the work behind `hf-specdraft check` and `hf-specdraft bench`.

Everything is counted the same way for every method. tau is the mean number of tokens committed per target pass, with
the prefill pass and what that pass committed left out. Our loop and plain generate commit one token in prefill;
transformers' prompt lookup already sends a draft along, so what its first pass committed is read from the cache length
that the second pass finds, and left out as well.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .drafters import AutoDrafter, Drafter, families
from .drafters.assistant import AssistantDrafter
from .inspection import recognise

PLAIN, LOOKUP, OVERALL = "plain", "prompt-lookup", "overall"


# Inputs ---------------------------------------------------------------------------------------------------------------


@dataclass
class Prompt:
    """One line of a prompt file: a JSON object with id, category and turns, as Spec-Bench has it. Its first turn."""

    id: str
    category: str
    text: str


def read_prompts(path: str | Path, per_category: int | None = None) -> list[Prompt]:
    """The prompts of a .jsonl file, at most `per_category` of each category, in the file's order.

    Raises ValueError naming the line that is not such an object.
    """
    prompts: list[Prompt] = []
    taken: dict[str, int] = {}
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = Prompt(str(row["id"]), row["category"], row["turns"][0])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: expected a JSON object with id, category and turns ({error!r})"
            ) from error
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if per_category is None or taken[prompt.category] <= per_category:
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def load_target(name: str, dtype: str = "auto", device: str = "cpu") -> tuple[Any, Any]:
    """(model, tokenizer) of a causal LM, in eval mode on `device`."""
    target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    return target, AutoTokenizer.from_pretrained(name)


def load_drafter(spec: str, dtype: str = "auto", device: str = "cpu") -> Drafter:
    """A drafter from a `NAME[:key=value,...]` spec.

    NAME is a family without weights (`ngram`), or a folder or Hub repository: a drafter that AutoDrafter reads, or a
    causal LM as transformers saves it, which becomes an assistant. The options are fields of the drafter's config,
    such as `ngram:tree_nodes=10,policy=fixed`.
    Raises ValueError for an option that the config does not have.
    """
    name, _, text = spec.partition(":")
    options = dict(_option(item, spec) for item in text.split(",") if item)
    family = families().get(name) or families().get(f"specdraft_{name}")
    if family is not None and family.is_free:
        _refuse_unknown(options, family, spec)
        drafter = family(family.config_class(**options))
    else:
        config = AutoDrafter.read_config(name)
        family, _ = recognise(config)
        # Published drafters have their target's model_type too; what they are stands in `architectures`.
        causal_lm = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type"))
        if family is None and causal_lm in (config.get("architectures") or ()):
            _refuse_unknown(options, AssistantDrafter, spec)
            drafter = AssistantDrafter.from_model(AutoModelForCausalLM.from_pretrained(name, dtype=dtype), **options)
        else:
            if family is not None:
                _refuse_unknown(options, family, spec)
            drafter = AutoDrafter.from_pretrained(name, dtype=dtype, **options)
    return drafter.to(device).eval()


def _option(item: str, spec: str) -> tuple[str, Any]:
    key, equals, value = item.partition("=")
    if not equals:
        raise ValueError(f"drafter {spec!r}: expected key=value after the colon, got {item!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _refuse_unknown(options: dict, family: type[Drafter], spec: str) -> None:
    unknown = sorted(set(options) - set(family.config_class.__dataclass_fields__))
    if unknown:
        raise ValueError(f"drafter {spec!r}: {family.config_class.__name__} has no field {', '.join(unknown)}")


def encode(tokenizer: Any, text: str, device: torch.device | str = "cpu", chat: bool = True) -> dict[str, Tensor]:
    """Model inputs [1, L] of `text`: a user's message where the tokenizer has a chat template, else as it stands."""
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        inputs = tokenizer(text, return_tensors="pt")
    return {key: inputs[key].to(device) for key in ("input_ids", "attention_mask")}


# One call, measured ---------------------------------------------------------------------------------------------------


class PassClock:
    """Counts and times the target's forward passes inside a `with` block, whatever loop makes them.

    seconds: duration of each pass. On an accelerator these are launch times, and no time split is drawn from them.
    lengths: tokens in the cache before each pass.
    """

    def __init__(self, target: Any):
        self.target = target
        self.seconds: list[float] = []
        self.lengths: list[int] = []

    def __enter__(self) -> PassClock:
        self._hooks = [
            self.target.register_forward_pre_hook(self._before, with_kwargs=True),
            self.target.register_forward_hook(self._after),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: Any, args: tuple, kwargs: dict) -> None:
        cache = kwargs.get("cache")
        self.lengths.append(0 if cache is None else int(cache.get_seq_length()))
        self._start = time.perf_counter()

    def _after(self, module: Any, args: tuple, output: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


@dataclass
class Run:
    """One call of generate with one row.

    ids: the new tokens. seconds: wall time of the call.
    passes: target passes after prefill; committed: tokens that these passes committed.
    prefill_seconds: the first pass.
    target_seconds, draft_seconds: time in forwards of target and drafter; None where it cannot be known from outside.
    speculation: the call's own statistics, where it has any.
    """

    ids: list[int]
    seconds: float
    passes: int
    committed: int
    prefill_seconds: float
    target_seconds: float | None
    draft_seconds: float | None
    speculation: Any = None


def run(target: Any, inputs: dict[str, Tensor], max_new_tokens: int, **arguments: Any) -> Run:
    """Generate greedily for one row and measure. `arguments` go to generate (assistant_model=..., ...)."""
    prompt_length = inputs["input_ids"].shape[1]
    with PassClock(target) as clock:
        _synchronize()
        start = time.perf_counter()
        output = target.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, return_dict_in_generate=True, **arguments
        )
        _synchronize()
        seconds = time.perf_counter() - start
    ids = output.sequences[0, prompt_length:].tolist()
    speculation = getattr(output, "speculation", None)
    on_cpu = target.device.type == "cpu"
    if speculation is not None:
        passes, committed = sum(speculation.rounds), sum(speculation.tokens) - len(speculation.tokens)
        target_seconds, draft_seconds = speculation.seconds["target"], speculation.seconds["draft"]
    else:
        # The second pass finds everything cached but the last committed token, which it reads.
        first = clock.lengths[1] - prompt_length + 1 if len(clock.lengths) > 1 else len(ids)
        passes, committed = len(clock.seconds) - 1, len(ids) - first
        target_seconds, draft_seconds = (sum(clock.seconds), 0.0) if on_cpu else (None, None)
    return Run(
        ids, seconds, passes, committed, clock.seconds[0], target_seconds, draft_seconds, speculation=speculation
    )


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# Is a difference rounding, or a fault? --------------------------------------------------------------------------------

TIE, FAULT = "rounding tie", "REAL FAULT"


@dataclass
class Difference:
    """The first place where two greedy continuations of one prompt part.

    position: index among the new tokens. plain_token, other_token: the two tokens, None where a text has ended.
    top_tokens, gap: the target's two best tokens there and the distance of their logits.
    shortfall: how far the other text's token lies below the best one.
    tolerance: the shortfall that rounding can explain.
    verdict: "rounding tie" or "REAL FAULT".
    """

    position: int
    plain_token: int | None
    other_token: int | None
    top_tokens: tuple[int, int]
    gap: float
    shortfall: float
    tolerance: float
    verdict: str


@torch.inference_mode()
def classify_difference(
    target: Any,
    prompt_ids: Sequence[int] | Tensor,
    plain_ids: Sequence[int] | Tensor,
    other_ids: Sequence[int] | Tensor,
    steps: float = 2.0,
    logits_processor: LogitsProcessorList | None = None,
) -> Difference | None:
    """Say whether two greedy texts differ by rounding or because one of them is wrong. None when they are equal.

    prompt_ids [L], plain_ids, other_ids: one row without padding; the latter two are new tokens only, as in
    `sequences[0, L:]`, plain_ids those of plain greedy generate. `logits_processor`: what the two calls applied.

    A pass over several tokens and several passes over one round differently, so in 16 bit two nearly equal logits may
    change order. A tie is granted when the other token's logit lies within `steps` steps of the target's dtype (at the
    size of the best logit) of the best one, or within twice what these two logits change when the target itself reads
    the same prefix in one pass instead of prefill and step. Everything else, and a text that ends where
    the other goes on, is a fault.
    """
    prompt, plain, other = (torch.as_tensor(x).flatten().tolist() for x in (prompt_ids, plain_ids, other_ids))
    if plain == other:
        return None
    pairs = zip(plain, other)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    plain_token, other_token = (x[position] if position < len(x) else None for x in (plain, other))

    prefix = torch.tensor([prompt + plain[:position]], device=target.device)
    whole = step = target(prefix).logits[0, -1].float()
    if prefix.shape[1] > 1:
        cache = target(prefix[:, :-1], use_cache=True).cache
        step = target(prefix[:, -1:], cache=cache, use_cache=True).logits[0, -1].float()
    if logits_processor is not None:
        whole, step = (logits_processor(prefix, x[None].clone())[0] for x in (whole, step))

    best, top = step.topk(2)
    tokens = [t for t in (int(top[0]), other_token) if t is not None]
    noise = (whole - step)[tokens].abs().max().item()
    size = max(abs(best[0].item()), torch.finfo(target.dtype).tiny)
    tolerance = max(steps * torch.finfo(target.dtype).eps * 2 ** math.floor(math.log2(size)), 2 * noise)
    shortfall = math.inf if other_token is None else (best[0] - step[other_token]).item()
    ended = plain_token is None or other_token is None
    return Difference(
        position=position,
        plain_token=plain_token,
        other_token=other_token,
        top_tokens=(int(top[0]), int(top[1])),
        gap=(best[0] - best[1]).item(),
        shortfall=shortfall,
        tolerance=tolerance,
        verdict=TIE if shortfall <= tolerance and not ended else FAULT,
    )


# Is the law the same when sampling? -----------------------------------------------------------------------------------


@dataclass
class Distance:
    """Total variation between assisted and plain sampling of a prompt's first tokens.

    tv: between `draws` assisted and `draws` plain draws. noise: between these plain draws and as many with other seeds.
    p_value: share of random re-labellings of the assisted and plain draws that lie at least as far apart as tv.
    """

    tv: float
    noise: float
    p_value: float
    draws: int
    tokens: int

    @property
    def within_noise(self) -> bool:
        """Whether chance explains the distance: false once in a thousand checks of a right sampler."""
        return self.p_value >= 0.001


def sampling_distance(
    target: Any, inputs: dict[str, Tensor], drafter: Drafter, draws: int = 256, tokens: int = 2, **arguments: Any
) -> Distance:
    """Compare the joint law of the first `tokens` new tokens, assisted against plain, over `draws` draws of each.

    `inputs` hold one row. `arguments` go to all calls (temperature, top_k, ...). Each call goes on for two
    tokens more than it compares, so that the compared ones can be drafted.
    """
    sample = _sampler(target, inputs, draws, tokens, arguments)
    plain, again, assisted = sample(0), sample(1), sample(2, assistant_model=drafter)
    law = np.random.default_rng(0)
    pooled, tv = plain + assisted, _total_variation(plain, assisted)
    shuffled = 1999
    # A hair below tv, so that sums added up in another order still count as equal.
    reached = sum(
        _total_variation(order[:draws], order[draws:]) >= tv - 1e-9
        for order in ([pooled[i] for i in law.permutation(2 * draws)] for _ in range(shuffled))
    )
    return Distance(tv, _total_variation(plain, again), (reached + 1) / (shuffled + 1), draws, tokens)


def _sampler(target: Any, inputs: dict[str, Tensor], draws: int, tokens: int, arguments: dict) -> Callable:
    prompt_length = inputs["input_ids"].shape[1]

    def sample(group: int, **extra: Any) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        while len(seen) < draws:
            # Far apart, so that no two calls of any group share a seed.
            torch.manual_seed(group * 1_000_003 + len(seen))
            rows = min(32, draws - len(seen))
            out = target.generate(
                **inputs, do_sample=True, max_new_tokens=tokens + 2, num_return_sequences=rows, **arguments, **extra
            )
            seen += map(tuple, out[:, prompt_length : prompt_length + tokens].tolist())
        return seen

    return sample


def _total_variation(first: list, second: list) -> float:
    counts: dict[Any, float] = {}
    for x in first:
        counts[x] = counts.get(x, 0.0) + 1 / len(first)
    for x in second:
        counts[x] = counts.get(x, 0.0) - 1 / len(second)
    return sum(map(abs, counts.values())) / 2


# The losslessness report ----------------------------------------------------------------------------------------------


@dataclass
class CheckReport:
    """Plain against assisted over some prompts.

    differences: by prompt id, the prompts whose greedy texts differ.
    tokens: new tokens of all prompts. passes, committed: as in Run, summed over the assisted calls.
    accepted_by_depth, offered_by_depth: nodes of depth 1, 2, ... accepted and offered.
    plain_seconds, assisted_seconds: wall time. target_seconds, draft_seconds: the assisted calls' forwards.
    token_seconds: plain's cost of a token after prefill. round_seconds: the cost of an assisted round.
    distances: by prompt id, when sampling was checked.
    """

    prompts: int = 0
    differences: dict[str, Difference] = field(default_factory=dict)
    tokens: int = 0
    passes: int = 0
    committed: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    offered_by_depth: list[int] = field(default_factory=list)
    plain_seconds: float = 0.0
    assisted_seconds: float = 0.0
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    token_seconds: float = math.nan
    round_seconds: float = math.nan
    distances: dict[str, Distance] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Tokens committed per target pass, prefill excluded."""
        return _ratio(self.committed, self.passes)

    @property
    def break_even(self) -> float:
        """The tau at which the measured costs of a round would make assisted as fast as plain."""
        return _ratio(self.round_seconds, self.token_seconds)

    @property
    def lossless(self) -> bool:
        """No difference that rounding does not explain, no distance that chance does not explain."""
        faults = [d for d in self.differences.values() if d.verdict == FAULT]
        return not faults and all(d.within_noise for d in self.distances.values())


def check(
    target: Any,
    drafter: Drafter,
    prompts: dict[str, dict[str, Tensor]],
    max_new_tokens: int = 64,
    draws: int = 0,
    sampling: dict[str, Any] | None = None,
    progress: Callable[[], Any] = lambda: None,
) -> CheckReport:
    """Run each prompt plain and assisted, greedily, and compare; with `draws`, compare sampled laws too.

    prompts: id -> model inputs of one row. sampling: generate's arguments for the sampled calls.
    progress: called after each prompt.
    """
    report = CheckReport(prompts=len(prompts))
    plain_steps = plain_after_prefill = assisted_after_prefill = 0.0
    warm = next(iter(prompts.values()))
    for arguments in ({}, {"assistant_model": drafter}):
        run(target, warm, 8, **arguments)
    for name, inputs in prompts.items():
        plain = run(target, inputs, max_new_tokens)
        assisted = run(target, inputs, max_new_tokens, assistant_model=drafter)
        difference = classify_difference(target, inputs["input_ids"], plain.ids, assisted.ids)
        if difference is not None:
            report.differences[name] = difference
        if draws:
            report.distances[name] = sampling_distance(target, inputs, drafter, draws, **(sampling or {}))
        report.tokens += len(assisted.ids)
        report.passes += assisted.passes
        report.committed += assisted.committed
        report.accepted_by_depth = _add(report.accepted_by_depth, assisted.speculation.accepted_by_depth)
        report.offered_by_depth = _add(report.offered_by_depth, assisted.speculation.offered_by_depth)
        report.plain_seconds += plain.seconds
        report.assisted_seconds += assisted.seconds
        report.target_seconds += assisted.target_seconds
        report.draft_seconds += assisted.draft_seconds
        plain_steps += plain.passes
        plain_after_prefill += plain.seconds - plain.prefill_seconds
        # The same prefill cost is taken off both, so that it cancels.
        assisted_after_prefill += assisted.seconds - plain.prefill_seconds
        progress()
    report.token_seconds = _ratio(plain_after_prefill, plain_steps)
    report.round_seconds = _ratio(assisted_after_prefill, report.passes)
    return report


def _add(first: list[int], second: list[int]) -> list[int]:
    length = max(len(first), len(second))
    first, second = ([*x, *[0] * (length - len(x))] for x in (first, second))
    return [a + b for a, b in zip(first, second)]


def _ratio(over: float, under: float) -> float:
    return over / under if under else math.nan


# The benchmark --------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    """One measured call of the benchmark, without its text. `equal`: whether the text is plain's."""

    prompt: str
    category: str
    method: str
    repeat: int
    tokens: int
    passes: int
    committed: int
    seconds: float
    target_seconds: float | None
    draft_seconds: float | None
    equal: bool


@dataclass
class Row:
    """A category (or "overall") and a method, over all prompts and repeats.

    tau: tokens committed per target pass, pooled over the prompts. tokens_per_second: median over repeats.
    to_plain, to_lookup: speed over that of plain generate and of prompt lookup: median, lowest, highest repeat.
    equal: prompts whose text was plain's in every repeat, out of `prompts`.
    outside: share of the wall time spent in neither the target's nor the drafter's forward; None when unknown.
    """

    category: str
    method: str
    prompts: int
    tau: float
    tokens_per_second: float
    to_plain: tuple[float, float, float]
    to_lookup: tuple[float, float, float]
    equal: int
    outside: float | None


def baselines(prompt_lookup_num_tokens: int = 10) -> dict[str, dict[str, Any]]:
    """generate's arguments for the two methods every benchmark runs."""
    return {PLAIN: {}, LOOKUP: {"prompt_lookup_num_tokens": prompt_lookup_num_tokens}}


def bench(
    target: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    methods: dict[str, dict[str, Any]],
    max_new_tokens: int = 128,
    repeats: int = 1,
) -> Iterator[Record]:
    """Run every method on every prompt, greedily, one row at a time; yields a record per call.

    methods: name -> generate's arguments, with the `baselines` among them. All methods of a prompt run one after the
    other, so that a slow minute of the machine hits all of them, and each repeat starts with another method.
    Each method runs once unrecorded first.
    """
    names = list(methods)
    for arguments in methods.values():
        run(target, encode(tokenizer, prompts[0].text, target.device), min(32, max_new_tokens), **arguments)
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            inputs = encode(tokenizer, prompt.text, target.device)
            turn = (repeat + index) % len(names)
            runs = {name: run(target, inputs, max_new_tokens, **methods[name]) for name in names[turn:] + names[:turn]}
            for name, r in runs.items():
                yield Record(
                    prompt=prompt.id,
                    category=prompt.category,
                    method=name,
                    repeat=repeat,
                    tokens=len(r.ids),
                    passes=r.passes,
                    committed=r.committed,
                    seconds=r.seconds,
                    target_seconds=r.target_seconds,
                    draft_seconds=r.draft_seconds,
                    equal=r.ids == runs[PLAIN].ids,
                )


def summarise(records: list[Record]) -> list[Row]:
    """The benchmark's table: per category in order of appearance, then overall, a row per method."""
    methods = sorted({r.method for r in records}, key=lambda name: (name != PLAIN, name != LOOKUP, name))
    rows = []
    for category in [*dict.fromkeys(r.category for r in records), OVERALL]:
        chosen = [r for r in records if category in (r.category, OVERALL)]
        speeds = {m: _speeds(chosen, m) for m in methods}
        for method in methods:
            mine = [r for r in chosen if r.method == method]
            known = [r for r in mine if r.target_seconds is not None]
            forwards = sum(r.target_seconds + r.draft_seconds for r in known)
            rows.append(
                Row(
                    category=category,
                    method=method,
                    prompts=len({r.prompt for r in mine}),
                    tau=_ratio(sum(r.committed for r in mine), sum(r.passes for r in mine)),
                    tokens_per_second=statistics.median(speeds[method]),
                    to_plain=_spread(speeds[method], speeds[PLAIN]),
                    to_lookup=_spread(speeds[method], speeds[LOOKUP]),
                    equal=len({r.prompt for r in mine} - {r.prompt for r in mine if not r.equal}),
                    outside=1 - forwards / sum(r.seconds for r in known) if known else None,
                )
            )
    return rows


def _speeds(records: list[Record], method: str) -> list[float]:
    repeats = sorted({r.repeat for r in records})
    chosen = [[r for r in records if r.method == method and r.repeat == i] for i in repeats]
    return [sum(r.tokens for r in group) / sum(r.seconds for r in group) for group in chosen]


def _spread(mine: list[float], others: list[float]) -> tuple[float, float, float]:
    ratios = [a / b for a, b in zip(mine, others)]
    return statistics.median(ratios), min(ratios), max(ratios)


def plot(rows: list[Row], path: str | Path) -> None:
    """Draw tau and speed over plain by category, a bar per method, as a PNG. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    categories = list(dict.fromkeys(r.category for r in rows))
    methods = list(dict.fromkeys(r.method for r in rows))
    width = 0.8 / len(methods)
    figure, panels = pyplot.subplots(2, 1, figsize=(2 + 1.3 * len(categories), 7), sharex=True, layout="constrained")
    for panel, value, label in (
        (panels[0], lambda r: r.tau, "tau (tokens per target pass)"),
        (panels[1], lambda r: r.to_plain[0], "speed over plain generate"),
    ):
        for index, method in enumerate(methods):
            bars = {r.category: value(r) for r in rows if r.method == method}
            places = [i + (index - (len(methods) - 1) / 2) * width for i in range(len(categories))]
            panel.bar(places, [bars[c] for c in categories], width, label=method)
        panel.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        panel.set_ylabel(label)
    panels[0].legend()
    panels[1].set_xticks(range(len(categories)), categories, rotation=20)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def provenance(**settings: Any) -> dict[str, Any]:
    """What a result needs beside it: versions, the commit of this package, the machine, the settings as given."""
    # Here, so that the package may offer parts of this module at its front door.
    from . import __version__

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "versions": {
            "hf_specdraft": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "commit": _commit(),
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "accelerator": None if device is None else torch.get_device_module(device).get_device_name(),
        },
        "settings": settings,
    }


def sha256(path: str | Path) -> str:
    """Checksum of a file, to say which prompts were used."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _commit() -> str | None:
    """The commit this package runs from, "-dirty" when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def write_json(path: str | Path, rows: list[Row], records: list[Record], about: dict[str, Any]) -> None:
    """Save a benchmark: {"about", "rows", "records"}."""
    content = {"about": about, "rows": [asdict(r) for r in rows], "records": [asdict(r) for r in records]}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
