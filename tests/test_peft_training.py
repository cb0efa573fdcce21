"""LoRA on a drafter: trained by the same trainer, saved as an adapter, loaded, merged, and used as it is."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_trainer import answers, distance, make_drafter, make_target, trainer

from hf_specdraft.training.loss import DraftLoss


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """A run of LoRA on one text: (the trainer, its output folder, the text)."""
    folder, data = tmp_path_factory.mktemp("lora"), answers(target, count=1)
    model = get_peft_model(make_drafter(), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    run = trainer(
        target,
        folder,
        drafter=model,
        data=data,
        loss=DraftLoss("ce"),
        eval_dataset=data,
        eval_prompts=[("one", torch.tensor(data[0]["input_ids"][:6]))],
        max_steps=120,
        per_device_train_batch_size=1,
        learning_rate=2e-2,
        logging_steps=60,
        eval_strategy="steps",
        eval_steps=60,
        eval_max_new_tokens=48,
        save_strategy="best",
        load_best_model_at_end=True,
    )
    run.train()
    run.finish()
    return run, folder, data[0]["input_ids"]


def generated(target, drafter, ids):
    prompt = torch.tensor([ids[:6]])
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    return target.generate(
        **inputs, max_new_tokens=48, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
    )


def test_only_the_adapter_learns(trained):
    run, _, _ = trained
    fresh = make_drafter().state_dict()
    for name, value in run.model.named_parameters():
        if "lora_B" in name:
            assert value.abs().max() > 0, name  # starts as zeros
        elif "lora_A" not in name:
            plain = name.removeprefix("base_model.model.").replace("base_layer.", "")
            assert torch.equal(value, fresh[plain]) and not value.requires_grad, name


def test_the_adapter_makes_the_drafter_better(trained):
    run, _, _ = trained
    taus = [entry["eval_tau"] for entry in run.state.log_history if "eval_tau" in entry]
    assert taus[-1] > 2 and run.state.best_metric == max(taus)


def test_an_adapter_only_is_saved_and_loads_again(trained):
    run, folder, _ = trained
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names and "model.safetensors" not in names
    loaded = PeftModel.from_pretrained(make_drafter(), folder)
    assert distance(loaded.state_dict(), run.model.state_dict()) == 0


def test_wrapped_and_merged_draft_the_same_and_the_text_is_plains(target, trained):
    _, folder, ids = trained
    # The policy that watches the time would pause at any round.
    wrapped = generated(target, PeftModel.from_pretrained(make_drafter(policy="fixed"), folder).eval(), ids)
    merged = PeftModel.from_pretrained(make_drafter(policy="fixed"), folder).merge_and_unload()
    assert type(merged).__name__ == "BlockDrafter"
    merged = generated(target, merged.eval(), ids)
    assert wrapped.sequences[0].tolist() == merged.sequences[0].tolist() == ids
    assert wrapped.speculation.tau == merged.speculation.tau > 2


def test_resuming_continues_the_adapter(target, tmp_path):
    def run(folder, **changes):
        torch.manual_seed(3)
        model = get_peft_model(make_drafter(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        return trainer(target, folder, drafter=model, **changes)

    whole = run(tmp_path, save_strategy="steps", save_steps=2)
    whole.train()
    parts = run(tmp_path)
    parts.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert distance(whole.model.state_dict(), parts.model.state_dict()) < 1e-6
