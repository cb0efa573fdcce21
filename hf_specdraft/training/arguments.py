"""TrainingArguments with what drafters need besides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments


@dataclass
class DraftTrainingArguments(TrainingArguments):
    """transformers' TrainingArguments; steps are optimizer updates everywhere.

    Other defaults than upstream's: learning rate 6e-4, warm-up over 4 % of the steps, cosine, gradients clipped at 1
    (DFlash, 2602.06036), columns kept (the collator names what it reads), best checkpoint by tau.

    muon_learning_rate: of Muon, which then trains the weight matrices (0.01 is a good start); AdamW trains the rest by
        `learning_rate`. None: everything as `optim` says.
    unroll: options of the drafter's own `unroll`. eval_unroll: those that differ in evaluation, which anyhow drafts at
        every token and as far as decoding does: the simulated tau needs that.
    eval_max_new_tokens: tokens decoded for each evaluation prompt.
    metric_for_best_model: "tau" is that of decoding the evaluation prompts, "simulated_tau" that of the evaluation
        dataset's texts, drafted as chains, "loss" its loss.
    """

    learning_rate: float = 6e-4
    warmup_steps: float = 0.04
    lr_scheduler_type: str = "cosine"
    max_grad_norm: float = 1.0
    remove_unused_columns: bool = False
    metric_for_best_model: str | None = "tau"
    muon_learning_rate: float | None = None
    unroll: dict[str, Any] = field(default_factory=dict)
    eval_unroll: dict[str, Any] = field(default_factory=dict)
    eval_max_new_tokens: int = 64

    def __post_init__(self):
        if self.remove_unused_columns:
            raise ValueError("remove_unused_columns must stay False: a drafter's forward names no column")
        if self.eval_max_new_tokens < 2:
            raise ValueError(
                f"eval_max_new_tokens must be at least 2, got {self.eval_max_new_tokens}: prefill gives the first"
            )
        super().__post_init__()
