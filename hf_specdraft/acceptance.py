"""SpecDec++'s acceptance prediction head (2405.19715): how good the token is that a drafter has just read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import cached_file

from .parts import Part, Scored

if TYPE_CHECKING:
    from .training.records import Unrolled


@dataclass
class Mixture:
    """What a head learns from: texts in which most of the target's tokens were replaced by the drafter's own.

    All over the flattened [B * L] columns of the batch. tokens: [C] what the drafter drew there from its law after the
    text's own tokens. judged: [C] bool, where that token stands in the mixed text. states: [C, H] of the drafter after
    reading the mixed text up to and including the column.
    """

    tokens: Tensor
    judged: Tensor
    states: Tensor


class AcceptanceHead(Part):
    """[..., H] the drafter's last hidden states at tokens it has read -> the chance that each of them is accepted.

    `num_layers` residual blocks x + SiLU(W x + b), which share ONE W and b, as in every published head (their list was
    made by multiplication), then two logits: rejected, accepted. Runs in float32.

    num_layers: residual blocks. reject_weight: how much more a rejection weighs in the loss.
    """

    terms = {"acceptance": True}

    def __init__(self, hidden_size: int, num_layers: int = 3, reject_weight: float = 6.0):
        super().__init__()
        if num_layers < 0 or not reject_weight > 0:
            raise ValueError(
                f"acceptance_head takes num_layers from 0 and reject_weight above 0, got {num_layers} and "
                f"{reject_weight}"
            )
        self.num_layers, self.reject_weight = num_layers, reject_weight
        self.linear = nn.Linear(hidden_size, hidden_size)
        self.out = nn.Linear(hidden_size, 2)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., 2] float32 log-probabilities that the token is rejected, accepted."""
        x = hidden.float()
        for _ in range(self.num_layers):
            x = x + F.silu(F.linear(x, self.linear.weight.float(), self.linear.bias.float()))
        return F.linear(x, self.out.weight.float(), self.out.bias.float()).log_softmax(-1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.log_probs(hidden)[..., 1].exp()

    def teach(self, unrolled: Unrolled, scored: Scored) -> None:
        """Add the term "acceptance" to what a drafter's slots say; `unrolled.context` is a Mixture.

        Soft cross entropy with min(1, p / q) of the drawn token, rejections weighted. The paper divides by the summed
        class weights, the loss here by its slots': another scale, which Adam does not see.
        """
        mixture, q = unrolled.context, scored.logits.detach()
        at = (unrolled.rows + 1).clamp(max=len(mixture.tokens) - 1)  # a row's law is about the column after it
        tokens, judged, hidden = mixture.tokens[at], mixture.judged[at], mixture.states[at]

        def term(teacher: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
            index = tokens.clamp(max=teacher.shape[-1] - 1)[..., None]
            p_over_q = teacher.log_softmax(-1).gather(-1, index) - q.float().log_softmax(-1).gather(-1, index)
            accept = p_over_q[..., 0].clamp(max=0).exp().where(tokens < teacher.shape[-1], 0)
            rejected, accepted = self.log_probs(hidden).unbind(-1)
            value = -self.reject_weight * (1 - accept) * rejected - accept * accepted
            return value.where(judged & mask, 0)

        scored.terms["acceptance"] = term

    def published(self) -> dict[str, Tensor]:
        """The weights under the names of published heads (Kaffaljidhmah2/SpecDec_pp)."""
        blocks = {
            f"model.{i}.linear.{k}": v for i in range(self.num_layers) for k, v in self.linear.state_dict().items()
        }
        return blocks | {f"model.{self.num_layers}.{k}": v for k, v in self.out.state_dict().items()}

    @torch.no_grad()
    def take_published(self, state: dict[str, Tensor]) -> None:
        """Copy a published head's weights. Files may hold the shared block once or once a layer.

        Raises ValueError for a head of another shape, and for blocks that differ: such a head never ran as it stands.
        """
        state = {name.removeprefix("module."): tensor for name, tensor in state.items()}
        own = self.published()
        shared = {name: tensor for name, tensor in state.items() if ".linear." in name}
        given = {name.split(".", 2)[2]: tensor for name, tensor in shared.items()}
        needed = {name: shape.shape for name, shape in own.items() if ".linear." not in name}
        fits = set(state) <= set(own) and set(needed) <= set(state) and (not self.num_layers or len(given) == 2)
        if not fits or any(tensor.shape != own[name].shape for name, tensor in state.items()):
            raise ValueError(
                f"the file's tensors ({', '.join(f'{k} {tuple(v.shape)}' for k, v in sorted(state.items()))}) do not "
                f"make an acceptance head of {self.num_layers} layers and width {self.out.in_features}; set "
                "acceptance_head={'num_layers': ...} as in its config.json, on a drafter of its width"
            )
        if any(not torch.equal(tensor, given[name.split(".", 2)[2]]) for name, tensor in shared.items()):
            raise ValueError("the head's residual blocks differ, but published heads share one; get a complete copy")
        for name, tensor in given.items():
            self.get_parameter(name).copy_(tensor)
        for name in ("weight", "bias"):
            getattr(self.out, name).copy_(state[f"model.{self.num_layers}.{name}"])


def load_published(name_or_path: str | Path, **hub: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A published head, such as hacky/acchead-llama2-chat-7bx70b: the config's `acceptance_head`, and the tensors for
    `AcceptanceHead.take_published`. hub: revision, token, ... Raises OSError when it is not there."""
    config = json.loads(Path(cached_file(str(name_or_path), "config.json", **hub)).read_text(encoding="utf-8"))
    return {"num_layers": config["num_layers"]}, load_file(cached_file(str(name_or_path), "model.safetensors", **hub))


def acceptance_head_of(drafter) -> AcceptanceHead | None:
    """The head of a drafter, or of the network of one that has parts."""
    found = getattr(drafter, "acceptance_head", None)
    return getattr(getattr(drafter, "network", None), "acceptance_head", None) if found is None else found
