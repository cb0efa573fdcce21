"""Muon for the matrices of a drafter, AdamW for everything else, as one optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon on weight matrices, AdamW on norms, biases, embeddings and heads (Jordan et al., 2024).

    Small drafters trained on few texts learn about twice as fast by it as by AdamW alone. Each group's learning rate is
    its own, and a schedule scales both.
    """

    def __init__(
        self, model: nn.Module, lr: float, muon_lr: float, weight_decay: float = 0.0, betas: tuple = (0.9, 0.95)
    ):
        """model: its parameters that require a gradient. lr: AdamW's. muon_lr: of the orthogonalised updates, whose
        size is that of the matrix's own spectrum. weight_decay: of the matrices.

        Raises ValueError when no weight matrix is left to train.
        """
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        tables |= {id(p) for name, p in model.named_parameters() if "lm_head" in name.split(".")}
        trained = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.ndim == 2 and id(p) not in tables]
        if not matrices:
            raise ValueError("Muon needs weight matrices to train, and there are none; leave muon_learning_rate out")
        rest = [p for p in trained if not any(p is matrix for matrix in matrices)]
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="original")
        ]
        if rest:
            self._parts.append(torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=0.0))
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._link()

    def _link(self) -> None:
        """The parts work on this optimizer's groups and state, so that schedules and checkpoints see only one."""
        for part, group in zip(self._parts, self.param_groups):
            part.param_groups, part.state = [group], self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._link()

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss
