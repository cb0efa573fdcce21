"""What a run leaves beside its checkpoints: the log and the plot."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import TrainerCallback

from .files import write_whole
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
        log = json.dumps(state.log_history, indent=1) + "\n"
        write_whole(folder / LOG_NAME, lambda path: path.write_text(log, encoding="utf-8"))
        plot_training(state.log_history, folder / PLOT_NAME)
