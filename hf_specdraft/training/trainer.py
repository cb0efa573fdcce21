"""transformers' Trainer for drafters: features filled in live, the loss inside forward, evaluation by decoding."""

from __future__ import annotations

import copy
import inspect
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, speed_metrics

from ..drafters.base import Drafter, TargetView
from ..evaluation.runs import run
from ..integration import as_drafter
from .arguments import DraftTrainingArguments
from .callbacks import HistoryCallback
from .data import collate
from .features import LiveFeatures, TargetLaw
from .loss import DraftLoss
from .optimizers import MuonAdamW
from .records import TrainingBatch
from .simulation import simulate
from .verify import BranchVerifier

if TYPE_CHECKING:
    from ..publishing import Provenance

Sums = dict[str, Tensor]
# Options of the families' unrolls that say where drafts start and how long they are: None is as in decoding.
EXTENT = ("anchors", "steps", "slots")


class DraftTrainer(Trainer):
    """Trains a drafter, or PEFT's wrapper of one, for a frozen target.

    The whole training step, loss included, happens inside the drafter's forward, so that DDP, FSDP, DeepSpeed and PEFT
    see an ordinary model. The target is no part of it: it is neither wrapped nor saved. A step's loss is the weighted
    mean over all its supervised slots, whatever the split into micro-batches and processes. (DeepSpeed steps inside
    backward, before the divisor is known: there it is the mean of the micro-batches' means.)
    """

    # The loss is already normalised over the accumulated batch.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: Drafter | nn.Module,
        args: DraftTrainingArguments,
        *,
        target: nn.Module,
        loss: DraftLoss,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        eval_prompts: Sequence[tuple[str, Tensor]] = (),
        features: Callable[[TrainingBatch, Tensor | None], TrainingBatch] | None = None,
        law: Callable[[Tensor, Tensor | None], Tensor] | None = None,
        provenance: Provenance | None = None,
        pad_token_id: int = 0,
        **kwargs: Any,
    ):
        """model: a drafter, or `get_peft_model(drafter, ...)`.

        target: the causal LM that the drafter drafts for; it is frozen, put into eval mode and onto the run's device.
        loss: a DraftLoss.
        train_dataset, eval_dataset: data folders' datasets (columns input_ids, loss_mask, document_ids).
        eval_prompts: (source, token ids [P]) of prompts that are decoded at each evaluation.
        features: fills in the target's hidden states in training (CapturedFeatures of the training set); by default,
            and always in evaluation, the target runs along. law: the target's logits; TargetLaw by default.
        provenance: facts written beside every saved drafter.
        Raises ValueError for a drafter that cannot serve the target, empty data, or a best-model metric that no
        evaluation gives.
        """
        drafter = as_drafter(model)
        if drafter is None:
            raise ValueError(f"DraftTrainer trains drafters of hf_specdraft, got {type(model).__name__}")
        for name, dataset in (("training", train_dataset), ("evaluation", eval_dataset)):
            if dataset is not None and len(dataset) == 0:
                raise ValueError(f"the {name} data set is empty; make it anew with hf-specdraft data")
        _check_metric(args, eval_dataset, eval_prompts)
        if getattr(target, "hf_device_map", None) is None:
            target.to(args.device)
        self.target = target.eval().requires_grad_(False)
        self.view = TargetView(target)
        drafter.check(self.view)
        self.loss = loss
        needs_law = loss.needs_law
        self.law = TargetLaw(target) if needs_law and law is None else law
        self.live = LiveFeatures(target, drafter.feature_layers, law=needs_law)
        self.features = self.live if features is None else features
        self.verify = BranchVerifier(target, drafter.feature_layers) if _verifies(drafter, args.unroll) else None
        self.eval_prompts = list(eval_prompts)
        self.provenance = provenance
        self._best_step: int | None = None  # of the weights, once the best ones are loaded
        self._step: Sums = {}  # of the micro-batches since the last update
        self._logged: Sums = {}  # of those since the last log
        super().__init__(
            model,
            args,
            data_collator=partial(collate, pad_token_id=pad_token_id),
            train_dataset=train_dataset,
            # Upstream wants a data set for any evaluation; prompts to decode are enough here.
            eval_dataset=() if eval_dataset is None and self.eval_prompts else eval_dataset,
            **kwargs,
        )
        self.add_callback(HistoryCallback())
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        # Takes the gathered weights when prompts are decoded.
        self._whole = copy.deepcopy(model).eval() if is_sharded and self.is_world_process_zero() else None

    @property
    def drafter(self) -> Drafter:
        """The drafter itself, beneath every wrapper."""
        return as_drafter(self.accelerator.unwrap_model(self.model))

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """As upstream's, or Muon where `muon_learning_rate` is given."""
        if self.optimizer is None and self.args.muon_learning_rate is not None:
            args, model = self.args, self.model if model is None else model
            self.optimizer = MuonAdamW(model, args.learning_rate, args.muon_learning_rate, args.weight_decay)
        return super().create_optimizer(model)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The micro-batch's numerator; `training_step` divides by the denominator of the whole batch."""
        batch = self.features(*self._batch(inputs))
        steps_inside = self.is_deepspeed_enabled
        self.loss.progress = self.state.global_step / max(1, self.state.max_steps)
        out = self._measure(model, batch, self.args.unroll, denominator=None if steps_inside else 1)
        sums = _sums(out)
        _add(self._step, sums)
        _add(self._logged, sums)
        loss = out["loss"] / self.current_gradient_accumulation_steps if steps_inside else out["loss"]
        return (loss, out) if return_outputs else loss

    def _batch(self, inputs: dict[str, Tensor]) -> tuple[TrainingBatch, Tensor | None]:
        names = ("input_ids", "document_ids", "position_ids", "loss_mask")
        return TrainingBatch(**{name: inputs[name] for name in names}, verify=self.verify), inputs.get("index")

    def _measure(self, model: nn.Module, batch: TrainingBatch, unroll: dict, **options) -> dict[str, Any]:
        """DraftLoss's result, from inside the model's forward."""
        return model(training=partial(self.loss, view=self.view, batch=batch, law=self.law, **options, **unroll))

    def training_step(self, model, inputs, num_items_in_batch=None):
        """Backward of a numerator; behind the last micro-batch the gradients are divided by the sum of denominators."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.is_deepspeed_enabled:
            return loss
        if not self.accelerator.sync_gradients:
            return torch.zeros_like(loss)
        total = self._reduced(self._step)
        self._step = {}
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        # Processes average their gradients.
        torch._foreach_mul_(gradients, self.accelerator.num_processes / total["denominator"])
        return total["numerator"] / total["denominator"]

    def _reduced(self, sums: Sums) -> Sums:
        """Summed over the processes."""
        return {key: self.accelerator.reduce(value, "sum") for key, value in sums.items()}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As upstream's; training logs also hold the metrics of the loss, averaged since the last log."""
        if "loss" in logs and self._logged:
            logs.update(_means(self._reduced(self._logged)))
            self._logged = {}
        super().log(logs, start_time)

    # Evaluation -------------------------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Loss, slot accuracy and simulated tau of the evaluation texts; tau, overall and by source, of decoding the
        evaluation prompts. Training's random state is left alone."""
        start = time.time()
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        self.model.eval()
        metrics = {}
        accelerators = [] if self.args.device.type == "cpu" else [self.args.device]
        with torch.random.fork_rng(accelerators, device_type=self.args.device.type), torch.no_grad():
            torch.manual_seed(self.args.seed)
            if dataset is not None and len(dataset):
                metrics.update(self._read(dataset))
            if self.eval_prompts:
                metrics.update(self._decode())
        metrics = {f"{metric_key_prefix}_{key}": value for key, value in metrics.items()}
        metrics.update(speed_metrics(metric_key_prefix, start))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _read(self, dataset: Any) -> dict[str, float]:
        """Loss, accuracies and simulated tau of a data set's texts."""
        model = self._wrap_model(self.model, training=False)
        sums: Sums = {}
        extent = {name: None for name in EXTENT if name in inspect.signature(self.drafter.unroll).parameters}
        unroll = {**self.args.unroll, **extent, **self.args.eval_unroll}
        size, world = self.args.eval_batch_size, self.args.world_size
        for step, inputs in enumerate(self.get_eval_dataloader(dataset)):
            batch, _ = self._batch(self._prepare_inputs(inputs))
            # Processes get equally many rows: the last ones may be the first ones over again.
            first = (step * world + self.args.process_index) * size
            batch.loss_mask[max(0, len(dataset) - first) :] = False
            out = self._measure(model, self.live(batch), unroll)
            _add(sums, _sums(out))
            committed, passes = simulate(out["matches"], out["anchors"], batch)
            _add(sums, {"committed": torch.tensor(committed), "passes": torch.tensor(passes)})
        total = self._reduced({key: value.to(self.args.device) for key, value in sums.items()})
        committed, passes = total.pop("committed"), total.pop("passes")
        return {
            "loss": (total["numerator"] / total["denominator"]).item(),
            "simulated_tau": (committed / passes).item() if passes else 1.0,
            **_means(total),
        }

    def _decode(self) -> dict[str, float]:
        """tau of greedy decoding, with drafts at every pass."""
        model, prompts = self._decoder()
        counts = []
        if prompts:
            drafter = as_drafter(model)
            policy, drafter.config.policy = drafter.config.policy, "fixed"
            autocast = drafter.__dict__.pop("forward", None)  # accelerate's, which no saved drafter has
            try:
                for source, ids in prompts:
                    ids = ids[None].to(self.target.device)
                    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                    result = run(self.target, inputs, self.args.eval_max_new_tokens, assistant_model=model)
                    counts.append((source, result.committed, result.passes))
            finally:
                drafter.config.policy = policy
                if autocast is not None:
                    drafter.forward = autocast
        counts = gather_object(counts)
        taus = {"tau": _tau(counts)}
        for source in sorted({source for source, _, _ in counts}):
            taus[f"tau_{source}"] = _tau([count for count in counts if count[0] == source])
        return taus

    def _decoder(self) -> tuple[nn.Module | None, list]:
        """A drafter that this process can decode with, and its share of the prompts."""
        if not (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            prompts = self.eval_prompts[self.args.process_index :: self.args.world_size]
            return self.accelerator.unwrap_model(self.model), prompts
        # Decoding calls parts of the drafter outside forward, where sharded weights are not whole.
        state = self.accelerator.get_state_dict(self.model_wrapped)
        if self._whole is None:
            return None, []
        self._whole.load_state_dict(state)
        return self._whole, self.eval_prompts

    # Saving -----------------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self.args.should_save and self.provenance is not None:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self.provenance.steps = self._best_step or self.state.global_step
            self.provenance.save(folder)  # first: the card that saving writes tells it
        super()._save(output_dir, state_dict)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: saving wrote the drafter's own card, and upstream's would take its place in `push_to_hub`."""

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._best_step = self.state.best_global_step

    def _save_checkpoint(self, model, trial) -> None:
        """As upstream's, but a checkpoint that could not be written whole is removed."""
        folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        with self._whole_or_nothing(f"checkpoint {folder}", lambda: shutil.rmtree(folder, ignore_errors=True)):
            super()._save_checkpoint(model, trial)

    def finish(self) -> None:
        """Save the trained drafter (the best one, where `load_best_model_at_end` says so) in the output folder."""
        folder = Path(self.args.output_dir)
        if self.is_fsdp_enabled:
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        if self.provenance is not None and not self._initial_global_step:
            self.provenance.seconds = self.state.log_history[-1]["train_runtime"]
        with self._whole_or_nothing(
            f"the drafter in {folder}", lambda: [w.unlink() for w in folder.glob("*.safetensors")]
        ):
            self.save_model()

    @contextmanager
    def _whole_or_nothing(self, what: str, remove: Callable[[], Any]) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self.args.should_save:
                remove()
            # A full disk, as Python, torch and safetensors say it.
            if isinstance(error, (OSError, RuntimeError, SafetensorError)):
                raise OSError(
                    f"{what} could not be written whole ({error}), so it was removed; earlier checkpoints are as they "
                    "were. Make room on the disk, then continue with --resume"
                ) from error
            raise


def last_checkpoint(folder: str | Path) -> Path | None:
    """The newest whole checkpoint of an output folder: upstream writes the trainer's state last."""
    found = [path for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if (path / TRAINER_STATE_NAME).is_file()]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _check_metric(args: DraftTrainingArguments, eval_dataset: Any, eval_prompts: Sequence) -> None:
    """Raise ValueError when the best checkpoint is asked for by a metric that evaluation will not give."""
    metric = (args.metric_for_best_model or "").removeprefix("eval_")
    chooses = args.load_best_model_at_end or args.save_strategy == "best"
    if args.eval_strategy == "no":
        return
    if eval_dataset is None and not eval_prompts:
        raise ValueError("evaluation needs an evaluation data set, prompts to decode, or eval_strategy='no'")
    if metric.startswith("tau") and not eval_prompts:
        if chooses:
            raise ValueError(
                "the best checkpoint is chosen by tau, but there are no evaluation prompts to decode; give some, or "
                "set metric_for_best_model='simulated_tau'"
            )
        args.metric_for_best_model = "simulated_tau"


def _sums(out: dict[str, Any]) -> Sums:
    """What adds up over batches and processes, of a result of DraftLoss."""
    weight = out["denominator"]
    sums = {key: out[key] for key in ("numerator", "denominator", "slot_correct", "slot_count")}
    sums["accepted"] = out["accepted"] * out["slot_count"][0]
    sums.update({f"term_{name}": value.detach() * weight for name, value in out["terms"].items()})
    if "slot_acceptance" in out:
        sums["slot_acceptance"] = out["slot_acceptance"]
    return {key: value.detach().float() for key, value in sums.items()}


def _add(sums: Sums, more: Sums) -> None:
    for key, value in more.items():
        sums[key] = sums[key] + value if key in sums else value


def _means(total: Sums) -> dict[str, float]:
    """Metrics for the log: each term, how many of a draft's first tokens are right, accuracy by slot (1 is the first
    drafted token), and the acceptance by slot where the loss measured it."""
    count = total["slot_count"].clamp(min=1)
    metrics = {key: (total[key] / total["denominator"]).item() for key in total if key.startswith("term_")}
    metrics["accepted"] = (total["accepted"] / count[0]).item()
    for name, key in (("accuracy", "slot_correct"), ("acceptance", "slot_acceptance")):
        if key in total:
            metrics.update({f"{name}_{slot}": v for slot, v in enumerate((total[key] / count).tolist(), 1)})
    return metrics


def _tau(counts: list[tuple[str, int, int]]) -> float:
    committed, passes = sum(c for _, c, _ in counts), sum(p for _, _, p in counts)
    return committed / passes if passes else 1.0


def _verifies(drafter: Drafter, unroll: dict[str, Any]) -> bool:
    """Whether training lets the target verify drafts: of a block drafter's modes, one does."""
    mode = unroll.get("mode") or getattr(drafter.config, "unroll_mode", None)
    name = mode.get("name") if isinstance(mode, dict) else mode
    return drafter.wants_rejected and name in (None, "carryover")
