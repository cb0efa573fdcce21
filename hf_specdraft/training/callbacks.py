"""What a run leaves beside its checkpoints: the log and the plot."""

from __future__ import annotations

import json
import os
from pathlib import Path

from transformers import TrainerCallback

from .plots import plot_training

LOG_NAME, PLOT_NAME = "training_log.json", "training.png"


class HistoryCallback(TrainerCallback):
    """Writes the run's log as JSON and its plot as PNG into the output folder after every evaluation and at the end."""

    def on_evaluate(self, args, state, control, **kwargs):
        self._write(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self._write(args, state)

    def _write(self, args, state) -> None:
        if not state.is_world_process_zero:
            return
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        whole = folder / f".{LOG_NAME}"  # a full disk must not cost the log there is
        whole.write_text(json.dumps(state.log_history, indent=1) + "\n", encoding="utf-8")
        os.replace(whole, folder / LOG_NAME)
        plot_training(state.log_history, folder / PLOT_NAME)
