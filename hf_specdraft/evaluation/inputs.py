"""Prompts, targets and drafters as the command line names them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .. import recipes
from ..drafters import AutoDrafter, Drafter, families
from ..drafters.assistant import AssistantDrafter
from ..drafters.combined import CombinedDrafter
from ..drafters.ngram import NgramConfig, NgramDrafter
from ..inspection import recognise
from ..packing import pack_linears

_NGRAM_AND = "ngram+"


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


def load_target(name: str, dtype: str = "auto", device: str = "cpu", pack: bool = False) -> tuple[Any, Any]:
    """(model, tokenizer) of a causal LM, in eval mode on `device`. pack: with packed linear layers (`packing.py`)."""
    target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    if pack:
        pack_linears(target)
    return target, AutoTokenizer.from_pretrained(name)


def load_drafter(spec: str, dtype: str = "auto", device: str = "cpu", pack: bool = False) -> Drafter:
    """A drafter from a `NAME[:key=value,...]` spec.

    NAME is a family without weights (`ngram`), or a folder or Hub repository: a drafter that AutoDrafter reads, or a
    causal LM as transformers saves it, which becomes an assistant. `ngram+` before it combines it with n-grams. The
    options are fields of the drafter's config, such as `ngram:tree_nodes=10,policy=fixed`, of `ngram+` those of
    CombinedConfig, such as `ngram+FOLDER:mode=tree`. `recipe=NAME` among them stands for that recipe's fields.
    pack: with packed linear layers (`packing.py`).
    Raises ValueError for an option that the config does not have.
    """
    name, _, text = spec.partition(":")
    # Commas inside a JSON value, as in policy={"name": "d_cut", "mode": 0.5}, part nothing.
    options = dict(_option(item, spec) for item in re.split(r",(?![^{\[]*[}\]])", text) if item)
    if "recipe" in options:
        options = {**recipes.get(options.pop("recipe")).draft, **options}
    if name.startswith(_NGRAM_AND):
        _refuse_unknown(options, CombinedDrafter, spec)
        network = load_drafter(name.removeprefix(_NGRAM_AND), dtype, device, pack)
        return CombinedDrafter.from_drafters(NgramDrafter(NgramConfig()), network, **options).to(device).eval()
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
    drafter = drafter.to(device).eval()
    if pack:
        pack_linears(drafter)
    return drafter


def _option(item: str, spec: str) -> tuple[str, Any]:
    if "=" not in item:
        raise ValueError(f"drafter {spec!r}: expected key=value after the colon, got {item!r}")
    return key_value(item)


def key_value(item: str) -> tuple[str, Any]:
    """Of `key=value` on a command line: the value is JSON, or else the text itself."""
    key, _, value = item.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _refuse_unknown(options: dict, family: type[Drafter], spec: str) -> None:
    unknown = sorted(set(options) - set(family.config_class.__dataclass_fields__))
    if unknown:
        raise ValueError(f"drafter {spec!r}: {family.config_class.__name__} has no field {', '.join(unknown)}")


def encode(
    tokenizer: Any,
    text: str,
    device: torch.device | str = "cpu",
    chat: bool = True,
    template_kwargs: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Model inputs [1, L] of `text`: a user's message where the tokenizer has a chat template, else as it stands.

    template_kwargs: what the template is rendered with, such as {"enable_thinking": False}.
    """
    if chat and tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **(template_kwargs or {})
        )
    else:
        inputs = tokenizer(text, return_tensors="pt")
    return {key: inputs[key].to(device) for key in ("input_ids", "attention_mask")}
