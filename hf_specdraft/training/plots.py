"""The picture of a run: tau and slot accuracy over optimizer steps."""

from __future__ import annotations

import re
from pathlib import Path

_ACCURACY = re.compile(r"eval_accuracy_(\d+)$")


def plot_training(history: list[dict], path: str | Path) -> bool:
    """Draw tau (decoded and simulated) and per-slot accuracy over steps as a PNG, from a Trainer's `state.log_history`.

    False, and no file, while the history holds no evaluation.
    """
    from matplotlib.figure import Figure

    curves: dict[str, list[tuple[int, float]]] = {}
    for entry in history:
        for key, value in entry.items():
            if key.startswith("eval_tau") or key == "eval_simulated_tau" or _ACCURACY.match(key):
                curves.setdefault(key, []).append((entry["step"], value))
    if not curves:
        return False
    figure = Figure(figsize=(10, 4), layout="constrained")  # without pyplot there is no state to clean up
    left, right = figure.subplots(1, 2)
    for key in sorted(curves):
        steps, values = zip(*sorted(curves[key]))
        slot = _ACCURACY.match(key)
        if slot:
            right.plot(steps, values, marker=".", label=f"slot {slot[1]}")
        else:
            left.plot(
                steps,
                values,
                marker=".",
                label=key.removeprefix("eval_").replace("_", " "),
                linewidth=2 if key == "eval_tau" else 1,
            )
    left.set(xlabel="optimizer steps", ylabel="tau (tokens per target pass)")
    right.set(xlabel="optimizer steps", ylabel="accuracy", ylim=(0, 1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return True
