"""The YAML that `hf-specdraft train` reads: its keys, and the trainer it describes."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from .. import evaluation, recipes
from ..drafters import AutoDrafter, families
from ..drafters.base import Drafter, TargetView
from ..inspection import recognise
from ..publishing import Provenance, template_mismatch
from .arguments import DraftTrainingArguments
from .capture import CapturedFeatures
from .data import collate, load
from .features import LiveFeatures
from .files import write_whole
from .loss import DraftLoss
from .on_policy import OnPolicyTexts
from .records import TrainingBatch
from .trainer import DraftTrainer, last_checkpoint
from .vocabulary import control_tokens, count_answers, draft_vocabulary, head_states, initialize_head

logger = logging.get_logger(__name__)

CONFIG_NAME = "train.yaml"
# Sections that may be written as one value, and the key it stands for.
_SHORT = {"target": "name", "eval_prompts": "file"}


@dataclasses.dataclass
class TrainConfig:
    """One run. Every section's keys are checked against what they configure, so a misspelt one is an error.

    target: {name, revision, dtype, attn_implementation}, or just the name: a folder or Hub repository.
    drafter: {family, fields of its config} for a new one, whose other fields the target decides (`for_target`); or
        {init_from, ...}: a trained one's folder or Hub name, whose weights start the run (with a fresh optimizer);
        fields beside it change its config and may add parts (`Drafter.grown`).
    data: a folder that `hf-specdraft data` wrote. Its held-out texts are for evaluation.
    trainer: fields of DraftTrainingArguments, output_dir among them.
    loss: arguments of DraftLoss. unroll: options of the family's unroll.
    eval_prompts: {file, per_category}, or just the file: prompts (.jsonl) to decode at each evaluation.
    draft_vocab: K for a head of the K most frequent tokens of the data, or a file of `hf-specdraft vocabulary`.
    start_texts: rows of the data from which a new drafter is started in closed form (`Drafter.start_from`).
    freeze: names of the drafter's modules that stay as they are, such as lm_head.
    train_only: names of the modules that are trained, such as corrector; all others stay as they are.
    lora: fields of PEFT's LoraConfig; the drafter then stays frozen and only the adapter is trained and saved.
    on_policy: options of OnPolicyTexts: train on answers to the data's prompts that the target writes during the run,
        drafted for by the drafter as it is then. Needs live features.
    features: "live" (the target runs along) or a folder that `hf-specdraft capture` wrote for the same data.
    recipe: one of `recipes` by name, whose settings stand where the file has none; any other is a name for the card.
    """

    target: dict[str, Any]
    drafter: dict[str, Any]
    data: str
    trainer: dict[str, Any]
    loss: dict[str, Any] = dataclasses.field(default_factory=lambda: {"terms": "ce"})
    unroll: dict[str, Any] = dataclasses.field(default_factory=dict)
    eval_prompts: dict[str, Any] | None = None
    draft_vocab: int | str | None = None
    start_texts: int = 0
    freeze: list[str] = dataclasses.field(default_factory=list)
    train_only: list[str] = dataclasses.field(default_factory=list)
    lora: dict[str, Any] | None = None
    on_policy: dict[str, Any] | None = None
    features: str = "live"
    recipe: str | None = None

    @classmethod
    def read(cls, path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
        """The config of a YAML file, or of a recipe by its name.

        overrides: "dotted.key=value", the value written as in YAML.

        Raises ValueError naming an unknown key (and the nearest known one), a missing one, or a value of a wrong kind.
        """
        if str(path) in recipes.known() and not Path(path).exists():
            values = {"recipe": str(path)}
        elif not Path(path).is_file():
            raise ValueError(
                f"there is no config file {path}, and no such recipe (there are {', '.join(recipes.known())})"
            )
        else:
            try:
                values = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
            except yaml.YAMLError as error:
                raise ValueError(f"{path} is not valid YAML: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold keys such as target, drafter and data, but it is {values!r}")
        for item in overrides:
            _override(values, item)
        if values.get("recipe") in recipes.known():
            values = recipes.beneath(recipes.get(values["recipe"]), values)
        return cls._of(values)

    @classmethod
    def _of(cls, values: dict) -> TrainConfig:
        fields = {field.name: field for field in dataclasses.fields(cls)}
        _refuse_unknown("", values, fields)
        values = {
            name: {_SHORT[name]: value} if name in _SHORT and isinstance(value, str) else value
            for name, value in values.items()
            if value is not None
        }
        for name, field in fields.items():
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                _require(values.get(name), f"the config has no {name}")
            if field.type.startswith("dict") and not isinstance(values.get(name, {}), dict):
                raise ValueError(f"{name} must be a section of keys, but it is {values[name]!r}")
        _refuse_kinds("", values, {"start_texts": 0})
        for name, example in (("freeze", "lm_head"), ("train_only", "corrector")):
            _require(isinstance(values.get(name, []), list), f"{name} must be a list of modules, such as [{example}]")
        config = cls(**values)
        config._check()
        return config

    def _check(self) -> None:
        _refuse_unknown("target", self.target, ("name", "revision", "dtype", "attn_implementation"))
        dtype = self.target.get("dtype", "auto")
        _require(
            dtype == "auto" or isinstance(getattr(torch, str(dtype), None), torch.dtype),
            f"target.dtype must be auto or one of torch's, such as bfloat16, but it is {dtype!r}",
        )
        _refuse_unknown("eval_prompts", self.eval_prompts or (), ("file", "per_category"))
        _refuse_unknown("loss", self.loss, inspect.signature(DraftLoss).parameters)
        _refuse_unknown("trainer", self.trainer, set(_fields(DraftTrainingArguments)) - {"unroll"})
        _refuse_kinds("trainer", self.trainer, _defaults(DraftTrainingArguments))
        _require(self.target.get("name"), "target has no name: give a folder or Hub repository")
        _require(self.trainer.get("output_dir"), "trainer has no output_dir: give the folder the drafter is saved to")
        _require(self.eval_prompts is None or self.eval_prompts.get("file"), "eval_prompts has no file")
        if self.on_policy is not None:
            options = OnPolicyTexts.__init__.__kwdefaults__
            _refuse_unknown("on_policy", self.on_policy, options)
            _refuse_kinds("on_policy", self.on_policy, options)
            _require(self.features == "live", "on_policy texts do not exist beforehand: set features to live")
        if self.lora is not None:
            _refuse_unknown("lora", self.lora, _fields(_peft().LoraConfig))
            if "init_from" not in self.drafter:
                raise ValueError("lora adapts a trained drafter: give its folder or Hub name as drafter.init_from")
        if ("family" in self.drafter) == ("init_from" in self.drafter):
            raise ValueError(
                "drafter needs either family (a new drafter) or init_from (a trained one to start from), and not both"
            )
        if self.draft_vocab is not None and "init_from" in self.drafter:
            raise ValueError("draft_vocab is for a new drafter; one that is trained has its vocabulary already")
        if self.start_texts and "init_from" in self.drafter:
            raise ValueError("start_texts is for a new drafter; the weights of one that is trained would be lost")
        family = self.family
        _refuse_unknown("drafter", self.drafter, ("family", "init_from", *_fields(family.config_class)))
        _refuse_kinds("drafter", self.drafter, _defaults(family.config_class))
        options = inspect.signature(family.unroll).parameters
        options = {name: option.default for name, option in options.items()}
        for name in ("self", "drafter", "view", "batch", "generator"):
            options.pop(name, None)
        for section, given in (("unroll", self.unroll), ("trainer.eval_unroll", self.trainer.get("eval_unroll") or {})):
            _refuse_unknown(section, given, options)
            _refuse_kinds(section, given, options)
            family.check_unroll(given)

    @property
    def family(self) -> type[Drafter]:
        """The drafter's class, by `drafter.family` or the config of `drafter.init_from`."""
        if "init_from" in self.drafter:
            family, _ = recognise(AutoDrafter.read_config(self.drafter["init_from"]))
            _require(family, f"drafter.init_from: {self.drafter['init_from']} is no drafter this package can read")
            return family
        known = {
            name.removeprefix("specdraft_"): family
            for name, family in families().items()
            if hasattr(family.config_class, "for_target")
        }
        _refuse_unknown("drafter.family", [self.drafter["family"]], known)
        return known[self.drafter["family"]]

    def save(self, folder: str | Path) -> None:
        """Write the config, overrides included, as `train.yaml`."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)
        write_whole(Path(folder) / CONFIG_NAME, lambda path: path.write_text(text, encoding="utf-8"))

    def checkpoint(self) -> Path:
        """The checkpoint that a resumed run goes on from.

        Raises ValueError when there is none, or when the run in the folder was another one (other than in `trainer`).
        """
        folder = Path(self.trainer["output_dir"])
        found = last_checkpoint(folder)
        if found is None:
            raise ValueError(f"{folder} holds no whole checkpoint to resume; start the run without --resume")
        before = TrainConfig.read(folder / CONFIG_NAME)
        changed = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(before, f.name)]
        changed = [name for name in changed if name != "trainer"]
        if changed:
            raise ValueError(
                f"the run in {folder} was started with another {', '.join(changed)}: resume with its own config "
                f"({CONFIG_NAME} there), or start a new run in another output_dir, with drafter.init_from if need be"
            )
        return found

    def refuse_used_folder(self) -> None:
        """Raise ValueError when a new run would mix its checkpoints with an earlier run's."""
        folder = self.trainer["output_dir"]
        if last_checkpoint(folder) is not None:
            raise ValueError(
                f"{folder} holds checkpoints of an earlier run: continue it with --resume, or give another output_dir"
            )

    def build(self, command: str | None = None) -> DraftTrainer:
        """Load everything and give the trainer. command: the command line, for the drafter's card.

        Raises ValueError, with cause and remedy, for what does not fit together, and OSError for what is not there.
        """
        args = DraftTrainingArguments(**self.trainer, unroll=self.unroll)
        loss = DraftLoss(**self.loss)
        train, held_out, about = load(self.data)
        target, tokenizer = self._target()
        _refuse_foreign(train, target)
        torch.manual_seed(args.seed)
        drafter = self._drafter(target, tokenizer, train)
        drafter.check(TargetView(target))
        if self.start_texts:
            drafter.start_from(TargetView(target), self._start_batches(target, drafter, train))
        if self.train_only:
            drafter.requires_grad_(False)
        for section, names, trained in (("train_only", self.train_only, True), ("freeze", self.freeze, False)):
            _refuse_unknown(section, names, dict(drafter.named_modules()))
            for name in names:
                drafter.get_submodule(name).requires_grad_(trained)
        template = {"sha256": about["chat_template_sha256"], "kwargs": about["chat_template_kwargs"]}
        drafter.config.chat_template_sha256 = template["sha256"]
        drafter.config.chat_template_kwargs = template["kwargs"]
        differs = template_mismatch(drafter, tokenizer, template["kwargs"])
        if differs is not None:
            logger.warning("of the target's own prompts: %s", differs)
        features = None
        if self.features != "live":
            features = CapturedFeatures(self.features, train, target, drafter.feature_layers, loss.needs_law)
        model = drafter if self.lora is None else _peft().get_peft_model(drafter, _peft().LoraConfig(**self.lora))
        if self.on_policy is not None:
            sharded = args.fsdp or args.deepspeed
            _require(not sharded, "on_policy drafts with the weights in training, which FSDP and DeepSpeed shard")
            train = OnPolicyTexts(train, target, model, **{"seed": args.seed, **self.on_policy})
        prompts = []
        if self.eval_prompts is not None:
            file, count = self.eval_prompts["file"], self.eval_prompts.get("per_category")
            for prompt in evaluation.read_prompts(file, count):
                inputs = evaluation.encode(tokenizer, prompt.text, template_kwargs=template["kwargs"])
                prompts.append((prompt.category, inputs["input_ids"][0]))
        return DraftTrainer(
            model,
            args,
            target=target,
            loss=loss,
            train_dataset=train,
            eval_dataset=held_out if args.eval_strategy != "no" else None,
            eval_prompts=prompts,
            features=features,
            provenance=Provenance.here(recipe=self.recipe, command=command, data=about, chat_template=template),
        )

    def read_of(self) -> tuple[PreTrainedModel, Any, tuple[int, ...]]:
        """What `capture` needs for this run: (target, training texts, layers that the drafter reads)."""
        train, _, _ = load(self.data)
        target, tokenizer = self._target()
        _refuse_foreign(train, target)
        drafter = self._drafter(target, tokenizer, train)
        drafter.check(TargetView(target))  # some learn here what they read
        return target, train, drafter.feature_layers

    def _target(self) -> tuple[PreTrainedModel, Any]:
        names = {key: value for key, value in self.target.items() if key != "name"}
        target = AutoModelForCausalLM.from_pretrained(self.target["name"], **{"dtype": "auto", **names})
        return target, AutoTokenizer.from_pretrained(self.target["name"], revision=self.target.get("revision"))

    def _start_batches(self, target: PreTrainedModel, drafter: Drafter, train: Any) -> Iterable[TrainingBatch]:
        if self.features == "live":
            fill = LiveFeatures(target, drafter.feature_layers)
        else:
            fill = CapturedFeatures(self.features, train, target, drafter.feature_layers, law=True)
        for first in range(0, min(self.start_texts, len(train)), 8):
            rows = collate([train[i] for i in range(first, min(first + 8, self.start_texts, len(train)))], 0)
            index = rows.pop("index", None)
            yield fill(TrainingBatch(**rows), index)

    def _drafter(self, target: PreTrainedModel, tokenizer: Any, train: Any) -> Drafter:
        family, fields = self.family, dict(self.drafter)
        source = fields.pop("init_from", None)
        if source is not None:
            drafter = AutoDrafter.from_pretrained(source, dtype=torch.float32)
            return drafter.grown(**fields) if fields else drafter
        del fields["family"]
        vocabulary = None
        if self.draft_vocab is not None:
            size = target.config.get_text_config().vocab_size
            always = [token for token in control_tokens(tokenizer, target.generation_config) if token < size]
            vocabulary = draft_vocabulary(self.draft_vocab, lambda: count_answers(train, size), always)
            if len(vocabulary.counts) != size:
                raise ValueError(
                    f"{self.draft_vocab} is a vocabulary for a target of {len(vocabulary.counts)} tokens, and this one "
                    f"has {size}; make one for it with `hf-specdraft vocabulary`"
                )
            fields.update(own_head=True, draft_vocab_size=len(vocabulary.ids))
        commit = getattr(target.config, "_commit_hash", None)
        fields = {"target_name": self.target["name"], "target_revision": commit, **fields}
        drafter = family(family.config_class.for_target(target.config, tokenizer, **fields))
        view = TargetView(target)
        if getattr(drafter.config, "own_head", False) and drafter.config.hidden_size == view.hidden_size:
            hidden = head_states(target, train) if drafter.config.draft_head_rank else None
            initialize_head(drafter, view, None if vocabulary is None else vocabulary.ids, hidden)
        elif vocabulary is not None:
            drafter.draft_ids.copy_(vocabulary.ids)  # the rows have another width than the target's, and stay random
        return drafter


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers and truth values: PyYAML takes 6e-4 for text, and the `no` of eval_strategy for false."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":bool")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(true|false)$", re.IGNORECASE), list("tTfF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _override(values: dict, item: str) -> None:
    key, equals, text = item.partition("=")
    if not equals or not key:
        raise ValueError(f"expected key=value such as trainer.learning_rate=1e-4, got {item!r}")
    *sections, last = key.split(".")
    for section in sections:
        inner = values.get(section)
        if isinstance(inner, str) and section in _SHORT:
            inner = {_SHORT[section]: inner}
        values[section] = inner = {} if inner is None else inner
        if not isinstance(inner, dict):
            raise ValueError(f"{item!r}: {section} is no section of keys")
        values = inner
    values[last] = yaml.load(text, _Loader)


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError:
        raise ValueError("lora needs peft: pip install 'hf_specdraft[train]'") from None
    return peft


def _fields(config_class: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config_class) if field.init]


def _refuse_foreign(texts: Any, target: PreTrainedModel) -> None:
    """Raise ValueError for texts with tokens that the target does not have."""
    from pyarrow import compute

    size = target.config.get_text_config().vocab_size
    largest = compute.max(compute.list_flatten(texts.data.column("input_ids"))).as_py()
    if largest >= size:
        raise ValueError(
            f"the data hold token {largest}, outside the target's vocabulary of {size}; they were made for another "
            "model, so make them anew with this target"
        )


def _defaults(config_class: type) -> dict[str, Any]:
    fields = dataclasses.fields(config_class)
    return {field.name: field.default for field in fields if "str" not in str(field.type)}


def _refuse_kinds(section: str, given: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise ValueError for what is no number, or no truth value, where the default is one."""
    for key, value in given.items():
        kind = type(defaults.get(key))
        if value is None or kind not in (bool, int, float):
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) != (kind is bool):
            what = "true or false" if kind is bool else "a number"
            raise ValueError(f"{section + '.' if section else ''}{key} must be {what}, but it is {value!r}")


def _refuse_unknown(section: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            raise ValueError(f"{section + '.' if section else ''}{_unknown(key, known)}")


def _unknown(key: str, known: Iterable[str]) -> str:
    names = sorted(map(str, known))
    near = difflib.get_close_matches(str(key), names, n=1, cutoff=0)
    return f"{key} is unknown" + (f"; did you mean {near[0]}?" if near else "; it takes no keys")


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)
