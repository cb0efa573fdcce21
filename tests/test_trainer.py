"""DraftTrainer: exact normalisation, exact resuming, evaluation by decoding, what it writes and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from hf_specdraft.drafters import AutoDrafter, TargetView
from hf_specdraft.drafters.assistant import AssistantDrafter
from hf_specdraft.drafters.block import BlockConfig, BlockDrafter
from hf_specdraft.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from hf_specdraft.training.arguments import DraftTrainingArguments
from hf_specdraft.training.capture import capture
from hf_specdraft.training.data import collate
from hf_specdraft.training.features import LiveFeatures, TargetLaw
from hf_specdraft.training.loss import DraftLoss
from hf_specdraft.training.optimizers import MuonAdamW
from hf_specdraft.training.records import TrainingBatch
from hf_specdraft.training.trainer import DraftTrainer, last_checkpoint


def make_target(**changes) -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    tokens = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **tokens, "initializer_range": 0.5, **changes})).eval()


def make_drafter(**fields) -> BlockDrafter:
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        block_size=4,
        mask_token_id=63,
        target_layer_ids=[0, 2],
        vocab_size=64,
        num_target_layers=4,
    )
    return BlockDrafter(BlockConfig(**{**sizes, **fields}))


def rows(count: int = 16, seed: int = 0) -> Dataset:
    """Random texts of unequal lengths and of unequal supervised share."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [12 + int(torch.randint(20, (1,), generator=generator)) for _ in range(count)]
    return Dataset.from_list(
        [
            {
                "id": str(i),
                "source": "random",
                "input_ids": torch.randint(1, 60, (length,), generator=generator).tolist(),
                "loss_mask": [column > 3 + i % 5 for column in range(length)],
                "document_ids": [1] * length,
            }
            for i, length in enumerate(lengths)
        ]
    )


def arguments(folder: Path, **changes) -> DraftTrainingArguments:
    values = dict(
        output_dir=str(folder),
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_strategy="no",
        logging_steps=1,
        unroll={"anchors": None},
        disable_tqdm=True,
    )
    return DraftTrainingArguments(**{**values, **changes})


@pytest.fixture(scope="module")
def target():
    return make_target()


def trainer(target, folder, drafter=None, data=None, loss=None, eval_dataset=None, eval_prompts=(), **changes):
    return DraftTrainer(
        make_drafter() if drafter is None else drafter,
        arguments(folder, **changes),
        target=target,
        loss=DraftLoss({"ce": 1.0, "tv": 0.5}, "dpace") if loss is None else loss,
        train_dataset=rows() if data is None else data,
        eval_dataset=eval_dataset,
        eval_prompts=eval_prompts,
    )


def weights(run) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.drafter.state_dict().items()}


def distance(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_accumulated_micro_batches_equal_one_batch(target, tmp_path):
    whole, parts = (
        trainer(target, tmp_path),
        trainer(target, tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=4),
    )
    start = weights(whole)
    whole.train(), parts.train()
    assert distance(weights(whole), weights(parts)) < 1e-6
    assert distance(weights(whole), start) > 1e-2
    for one, other in zip(whole.state.log_history, parts.state.log_history):
        for key in set(one) - {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"}:
            assert one[key] == pytest.approx(other[key], abs=1e-5), key


def test_the_loss_of_a_step_is_the_mean_over_its_slots(target, tmp_path):
    run = trainer(target, tmp_path, max_steps=1, per_device_train_batch_size=16)
    drafter, loss = make_drafter(), run.loss
    batch = run.live(run._batch(collate(list(rows()), 0))[0])
    expected = loss(drafter, run.view, batch, run.law, anchors=None)
    run.train()
    assert run.state.log_history[0]["loss"] == pytest.approx(expected["loss"].item(), abs=1e-5)
    right, of = expected["slot_correct"], expected["slot_count"]
    assert run.state.log_history[0]["accuracy_2"] == pytest.approx(float(right[1] / of[1]), abs=1e-5)


class Samples(TrainerCallback):
    """The tokens of every step's micro-batches, and the learning rates."""

    def __init__(self, run):
        self.seen, self.rates = [], []
        measure = run.features

        def features(batch, index=None):
            self.seen.append(batch.input_ids.tolist())
            return measure(batch, index)

        run.features = features
        run.add_callback(self)

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.rates.append(lr_scheduler.get_last_lr())


@pytest.mark.parametrize(("accumulation", "muon"), [(1, None), (4, None), (1, 0.02)])
def test_interrupted_and_resumed_equals_uninterrupted(accumulation, muon, target, tmp_path):
    """Field case 60. Epochs of 4 updates, so the break falls inside one; anchors are drawn, so chance must resume."""
    changes = dict(
        muon_learning_rate=muon,
        max_steps=10,
        per_device_train_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        unroll={"anchors": 3},
    )
    whole = trainer(target, tmp_path / "whole", **changes)
    expected = Samples(whole)
    whole.train()

    first = trainer(target, tmp_path / "parts", save_strategy="steps", save_steps=5, **changes)
    first.add_callback(StopAt(5))
    first.train()
    assert first.state.global_step == 5
    second = trainer(target, tmp_path / "parts", **changes)
    seen = Samples(second)
    second.train(resume_from_checkpoint=str(last_checkpoint(tmp_path / "parts")))
    assert second.state.global_step == 10
    assert seen.seen == expected.seen[5 * accumulation :]
    assert seen.rates == expected.rates[5:] and len(seen.rates[0]) == 2
    assert isinstance(getattr(second.optimizer, "optimizer", second.optimizer), MuonAdamW) == (muon is not None)
    assert distance(weights(whole), weights(second)) < 1e-6


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def test_a_checkpoint_that_was_not_finished_is_no_place_to_resume(tmp_path):
    for step, whole in ((5, True), (10, True), (100, False)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if whole:
            (folder / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path).name == "checkpoint-10"
    assert last_checkpoint(tmp_path / "nothing") is None


def make_eagle3(target):
    torch.manual_seed(0)
    return Eagle3Drafter(Eagle3Config.for_target(target.config))


@pytest.mark.parametrize("family", ["block", "eagle3"])
def test_training_in_bfloat16_on_a_cpu(family, target, tmp_path):
    """Weights stay float32, and evaluation decodes as the saved drafter will: without autocast."""
    fresh = make_drafter if family == "block" else lambda: make_eagle3(target)
    data = answers(target, count=4)
    changes = dict(data=data, eval_prompts=prompts_of(data), eval_max_new_tokens=16, max_steps=8)
    run = trainer(target, tmp_path, drafter=fresh(), bf16=True, eval_strategy="steps", eval_steps=8, **changes)
    run.train()
    run.finish()
    exact = trainer(target, tmp_path / "exact", drafter=fresh(), **changes)
    exact.train()
    assert run.drafter.dtype == torch.float32
    assert 0 < distance(weights(run), weights(exact)) < 0.1
    assert run.state.log_history[0]["loss"] == pytest.approx(exact.state.log_history[0]["loss"], rel=0.02)
    taus = [entry["eval_tau"] for entry in run.state.log_history if "eval_tau" in entry]
    saved = trainer(target, tmp_path / "saved", drafter=AutoDrafter.from_pretrained(tmp_path), **changes)
    assert saved.evaluate()["eval_tau"] == taus[-1]


@pytest.mark.parametrize("family", ["block", "eagle3"])
def test_two_chats_packed_train_as_they_do_apart(family, target):
    """From the rows of a data folder to the gradients: the target's states and law, the unroll and the loss."""
    chats = list(rows(2))
    both = {
        "input_ids": chats[0]["input_ids"] + chats[1]["input_ids"],
        "loss_mask": chats[0]["loss_mask"] + chats[1]["loss_mask"],
        "document_ids": [1] * len(chats[0]["input_ids"]) + [2] * len(chats[1]["input_ids"]),
    }
    loss, law = DraftLoss({"ce": 1.0, "tv": 0.5, "forward_kl": 0.5}, "dpace"), TargetLaw(target)
    results = []
    for given in ([both], chats, chats[::-1]):
        drafter = make_drafter() if family == "block" else make_eagle3(target)
        batch = LiveFeatures(target, drafter.feature_layers)(TrainingBatch(**collate(given, 0)))
        out = loss(drafter, TargetView(target), batch, law, anchors=None)
        out["loss"].backward()
        gradients = {name: p.grad for name, p in drafter.named_parameters() if p.requires_grad}
        assert all(gradient.any() for gradient in gradients.values())
        results.append((out["loss"].detach(), out["denominator"], int(out["slot_count"].sum()), gradients))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=1e-6, rtol=1e-4)


# Evaluation -----------------------------------------------------------------------------------------------------------


def answers(target, count=3, prompt=6, new=48) -> Dataset:
    """The target's own greedy answers, each to a random prompt."""
    generator = torch.Generator().manual_seed(7)
    prompts = torch.randint(1, 60, (count, prompt), generator=generator)
    texts = target.generate(prompts, max_new_tokens=new, do_sample=False).tolist()
    return Dataset.from_list(
        [
            {"input_ids": t, "loss_mask": [c >= prompt for c in range(len(t))], "document_ids": [1] * len(t)}
            for t in texts
        ]
    )


def prompts_of(data: Dataset) -> list[tuple[str, torch.Tensor]]:
    """The prompts of `answers`, the first of a source of its own."""
    return [("rest" if i else "first", torch.tensor(row["input_ids"][:6])) for i, row in enumerate(data)]


def test_overfitted_drafter_decodes_what_it_was_simulated_to(target, tmp_path):
    """Field case 56: overfitting gives tau near the block size, in decoding too."""
    data = answers(target)
    run = trainer(
        target,
        tmp_path,
        data=data,
        loss=DraftLoss("ce"),
        eval_dataset=data,
        eval_prompts=prompts_of(data),
        max_steps=150,
        eval_strategy="steps",
        eval_steps=50,
        save_strategy="best",
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to=["tensorboard"],
        eval_on_start=True,
        eval_max_new_tokens=48,
    )
    run.train()
    before, *_, after = (entry for entry in run.state.log_history if "eval_tau" in entry)
    assert before["step"] == 0 and before["eval_tau"] < 2
    assert after["eval_tau"] >= 0.9 * run.drafter.config.block_size
    assert after["eval_simulated_tau"] == pytest.approx(after["eval_tau"], rel=0.05)
    assert after["eval_accuracy_1"] > 0.95 and after["eval_loss"] < before["eval_loss"]
    assert 1 <= after["eval_tau_first"] and 1 <= after["eval_tau_rest"]
    assert run.drafter.config.policy == "auto"

    log = json.loads((tmp_path / "training_log.json").read_text())
    taus = {entry["step"]: entry["eval_tau"] for entry in log if "eval_tau" in entry}
    best = max(taus, key=taus.get)
    assert run.state.best_metric == taus[best]
    assert Path(run.state.best_model_checkpoint).name == f"checkpoint-{best}"
    assert distance(weights(run), AutoDrafter.from_pretrained(run.state.best_model_checkpoint).state_dict()) == 0
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def half_learned(family, target):
    if family == "block":
        return make_drafter(), {}, 40
    if family == "eagle3":
        # Fewer steps are trained than are drafted.
        return make_eagle3(target).initialise_from(target), dict(unroll={"anchors": None, "steps": 2}), 40
    torch.manual_seed(2)
    small = LlamaForCausalLM(LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1}))
    return AssistantDrafter.from_model(small, num_assistant_tokens=4), dict(unroll={}), 16


@pytest.mark.parametrize("family", ["block", "eagle3", "assistant"])
def test_the_tau_that_training_prints_is_that_of_decoding(family, target, tmp_path):
    """Of drafters that know the texts in part, and of answers that the target ends where it was asked to."""
    data = answers(target, count=4)
    drafter, changes, steps = half_learned(family, target)
    run = trainer(
        target,
        tmp_path,
        drafter=drafter,
        data=data,
        loss=DraftLoss("ce"),
        eval_dataset=data,
        eval_prompts=prompts_of(data),
        max_steps=steps,
        eval_strategy="steps",
        eval_steps=steps // 2,
        eval_max_new_tokens=48,
        **changes,
    )
    run.train()
    found = [(e["eval_simulated_tau"], e["eval_tau"]) for e in run.state.log_history if "eval_tau" in e]
    print(found)
    assert len(found) == 2 and any(1.1 < tau < 3 for _, tau in found)
    for simulated, decoded in found:
        assert simulated == pytest.approx(decoded, rel=0.05)


def test_evaluation_leaves_training_alone(target, tmp_path):
    changes = dict(unroll={"anchors": 3}, max_steps=4)
    silent = trainer(target, tmp_path / "silent", **changes)
    silent.train()
    watched = trainer(
        target, tmp_path / "watched", eval_dataset=rows(5), eval_strategy="steps", eval_steps=1, **changes
    )
    watched.train()
    assert distance(weights(silent), weights(watched)) == 0


def test_captured_features_train_as_live_ones_do(target, tmp_path):
    data = rows()
    data = data.add_column("index", list(range(len(data))))
    live = trainer(target, tmp_path / "live", data=data)
    live.train()
    stored = trainer(target, tmp_path / "stored", data=data)
    stored.features = capture(target, data, stored.drafter.feature_layers, tmp_path / "features")
    stored.train()
    assert distance(weights(live), weights(stored)) < 1e-6


# Saving and refusing --------------------------------------------------------------------------------------------------


def test_full_disk_removes_the_partial_checkpoint_and_keeps_the_earlier(target, tmp_path, monkeypatch):
    run = trainer(target, tmp_path, save_strategy="steps", save_steps=2)
    save = torch.save

    def full(thing, path, *args, **kwargs):
        if "checkpoint-4" in str(path):
            save(thing, path)
            raise OSError(28, "No space left on device")
        save(thing, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="checkpoint-4 could not be written whole .*No space left.*--resume"):
        run.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    assert AutoDrafter.from_pretrained(tmp_path / "checkpoint-2").config.block_size == 4


def test_what_cannot_work_is_refused_before_any_step(target, tmp_path):
    with pytest.raises(ValueError, match="trains drafters of hf_specdraft, got LlamaForCausalLM"):
        trainer(target, tmp_path, drafter=target)
    with pytest.raises(ValueError, match="the training data set is empty"):
        trainer(target, tmp_path, data=rows().select([]))
    with pytest.raises(ValueError, match="built for a target of 5 layers"):
        trainer(target, tmp_path, drafter=make_drafter(num_target_layers=5))
    with pytest.raises(ValueError, match="needs an evaluation data set, prompts"):
        trainer(target, tmp_path, eval_strategy="steps", eval_steps=1)
    with pytest.raises(ValueError, match="chosen by tau, but there are no evaluation prompts"):
        trainer(target, tmp_path, eval_dataset=rows(), eval_strategy="steps", eval_steps=1, save_strategy="best")
    with pytest.raises(ValueError, match="remove_unused_columns must stay False"):
        arguments(tmp_path, remove_unused_columns=True)
    assert not list(tmp_path.iterdir())
