"""Muon and AdamW as one optimizer."""

import copy

import pytest
import torch
from torch import nn

from hf_specdraft.training.optimizers import MuonAdamW


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(7, 6)
        self.fc = nn.Linear(6, 4)
        self.frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.norm = nn.RMSNorm(4)
        self.lm_head = nn.Linear(4, 7, bias=False)

    def forward(self, ids):
        return self.lm_head(self.norm(self.frozen(self.fc(self.embed_tokens(ids)))))


def step(net, optimizer, seed):
    ids = torch.randint(0, 7, (8,), generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(ids), (ids + 1) % 7).backward()
    optimizer.step()


def make(net):
    return MuonAdamW(net, lr=1e-2, muon_lr=2e-2, weight_decay=0.1)


def test_each_parameter_is_updated_as_its_own_optimizer_would():
    net, alone = Net(), Net()
    optimizer = make(net)
    rest = [p for name, p in alone.named_parameters() if name not in ("fc.weight", "frozen.weight")]
    parts = (
        torch.optim.Muon([alone.fc.weight], lr=2e-2, weight_decay=0.1, adjust_lr_fn="original"),
        torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0),
    )
    for seed in range(3):
        step(net, optimizer, seed)
        for part in parts:
            part.zero_grad()
        ids = torch.randint(0, 7, (8,), generator=torch.Generator().manual_seed(seed))
        nn.functional.cross_entropy(alone(ids), (ids + 1) % 7).backward()
        for part in parts:
            part.step()
    for (name, ours), theirs in zip(net.named_parameters(), alone.parameters()):
        assert torch.equal(ours, theirs), name
    assert not torch.equal(net.fc.weight, Net().fc.weight)
    assert torch.equal(net.frozen.weight, Net().frozen.weight)


def test_a_schedule_scales_both_rates_and_a_checkpoint_restores_them():
    net = Net()
    optimizer = make(net)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    for seed in range(2):
        step(net, optimizer, seed)
        schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2e-2 / 3, 1e-2 / 3])
    resumed = copy.deepcopy(net)
    again = make(resumed)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in (2, 3):
        step(net, optimizer, seed)
        step(resumed, again, seed)
    for ours, theirs in zip(net.parameters(), resumed.parameters()):
        assert torch.equal(ours, theirs)


def test_nothing_for_muon_is_an_error():
    with pytest.raises(ValueError, match="muon_learning_rate"):
        make(nn.Embedding(3, 4))
