"""hf-specdraft train on a tiny model: its config, what it writes and continues, and what it refuses."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_cli import byte_tokenizer, call
from test_trainer import make_target

from hf_specdraft.drafters import AutoDrafter
from hf_specdraft.publishing import Provenance
from hf_specdraft.training.config import TrainConfig
from hf_specdraft.training.data import load, prepare
from hf_specdraft.training.vocabulary import Vocabulary

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "train_block.yaml"
TEXTS = ["abcabcabc", "hello, hello", "one two three", "0123456789", "xyxyxy", "to be or not", "la la la", "round and"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a target, a data folder of its answers, and prompts."""
    folder = tmp_path_factory.mktemp("train")
    tokenizer = byte_tokenizer()
    target = make_target(vocab_size=256)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    rows = []
    for number, text in enumerate(TEXTS):
        ids = tokenizer(text + ">", return_tensors="pt").input_ids
        answer = target.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :].tolist()
        rows.append({"id": str(number), "prompt": text, "answer": tokenizer.decode(answer), "answer_ids": answer})
    prepare(rows, tokenizer, folder / "answers", held_out=0.3, mode={})
    prompts = [{"id": str(i), "category": "ab"[i % 2], "turns": [t]} for i, t in enumerate(TEXTS[:4])]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return folder


@pytest.fixture
def config(place, tmp_path) -> Path:
    """The example, made tiny."""
    values = yaml.safe_load(EXAMPLE.read_text())
    values.update(target=str(place / "target"), data=str(place / "answers"))
    values["eval_prompts"] = {"file": str(place / "prompts.jsonl"), "per_category": 1}
    values["drafter"].update(block_size=4, mask_token_id=255)
    values["trainer"].update(
        output_dir=str(tmp_path / "out"),
        max_steps=4,
        eval_steps=2,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        learning_rate="1e-2",
        per_device_train_batch_size=1,
        eval_max_new_tokens=8,
        disable_tqdm=True,
        save_total_limit=4,
        save_strategy="steps",
        save_steps=2,
    )
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values).replace("'1e-2'", "1e-2"))
    return file


def test_train_writes_a_drafter_with_its_facts(config, place, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["anything", "train", "config.yaml", "recipe=tiny"])
    said = call("train", config, "recipe=tiny")
    out = tmp_path / "out"
    assert said.stdout.splitlines()[-1] == f"4 steps, best tau {best_of(out):.3f}; drafter in {out}"
    drafter = AutoDrafter.from_pretrained(out)
    assert (drafter.config.block_size, drafter.config.num_target_layers) == (4, 4)
    assert drafter.config.target_name == str(place / "target")
    assert drafter.config.chat_template_sha256 == Provenance.load(out).chat_template["sha256"] != ""
    facts = Provenance.load(out)
    assert facts.recipe == "tiny" and facts.seconds > 0 and facts.data["splits"]["train"]["rows"] > 0
    assert facts.command == "hf-specdraft train config.yaml recipe=tiny"
    best = json.loads((out / "checkpoint-4" / "trainer_state.json").read_text())["best_global_step"]
    assert facts.steps == best
    assert Provenance.load(out / "checkpoint-2").steps == 2
    saved = load_file(out / f"checkpoint-{best}" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in drafter.state_dict().items())
    assert {"training_log.json", "training.png", "train.yaml", "README.md"} <= {path.name for path in out.iterdir()}
    assert TrainConfig.read(out / "train.yaml").recipe == "tiny"
    assert any("eval_tau_b" in entry for entry in json.loads((out / "training_log.json").read_text()))


def best_of(out: Path) -> float:
    return max(
        entry["eval_tau"] for entry in json.loads((out / "training_log.json").read_text()) if "eval_tau" in entry
    )


def test_resume_continues_and_init_from_starts_anew(config, place, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    still = ("trainer.eval_strategy=no", "trainer.load_best_model_at_end=false")
    call("train", config, *still, f"trainer.output_dir={whole}")
    call("train", config, *still, f"trainer.output_dir={parts}")
    for name in ("checkpoint-4", "model.safetensors"):
        shutil.rmtree(parts / name) if (parts / name).is_dir() else (parts / name).unlink()
    call("train", config, *still, f"trainer.output_dir={parts}", "--resume")
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert all((first[name] - second[name]).abs().max() < 1e-6 for name in first)

    with pytest.raises(ValueError, match="holds checkpoints of an earlier run: continue it with --resume"):
        call("train", config, *still, f"trainer.output_dir={parts}")
    with pytest.raises(ValueError, match="started with another loss: resume with its own config"):
        call("train", config, *still, f"trainer.output_dir={parts}", "--resume", "loss.terms=ce")
    with pytest.raises(ValueError, match="--resume continues .* drafter.init_from starts a new one"):
        call("train", config, f"drafter.init_from={whole}", "--resume")
    with pytest.raises(ValueError, match="holds no whole checkpoint to resume"):
        call("train", config, "--resume")

    warm = yaml.safe_load(config.read_text())
    warm["drafter"] = {"init_from": str(whole)}
    config.write_text(yaml.safe_dump(warm))
    call("train", config, *still, "trainer.max_steps=1", "trainer.save_strategy=no")
    third = load_file(tmp_path / "out" / "model.safetensors")
    # The first step of the warm-up has a rate of 0.
    assert all(torch.equal(first[name], third[name]) for name in first)


def test_lora_saves_an_adapter_only(config, tmp_path):
    call("train", config, "trainer.max_steps=1", "trainer.eval_strategy=no", "trainer.load_best_model_at_end=false")
    values = yaml.safe_load(config.read_text())
    values.update(drafter={"init_from": str(tmp_path / "out")}, lora={"r": 2, "target_modules": ["q_proj", "v_proj"]})
    values["trainer"].update(output_dir=str(tmp_path / "adapter"))
    config.write_text(yaml.safe_dump(values))
    call("train", config)
    names = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    assert Provenance.load(tmp_path / "adapter").recipe == "dflash"


def test_draft_vocab_makes_an_own_head_of_the_most_frequent_tokens(config, place, tmp_path):
    call(
        "train",
        config,
        "draft_vocab=64",
        "trainer.max_steps=1",
        "trainer.eval_strategy=no",
        "trainer.load_best_model_at_end=false",
        "trainer.save_strategy=no",
    )
    drafter = AutoDrafter.from_pretrained(tmp_path / "out")
    head = load_file(place / "target" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(drafter.lm_head.weight, head[drafter.draft_token_ids])  # the warm-up's first rate is 0
    written = {token for row in load(place / "answers")[0] for token in row["input_ids"][-16:]}
    assert len(written & set(drafter.draft_token_ids.tolist())) == min(64, len(written))


DSPARK = {"terms": {"ce": 0.1, "tv": 1.8, "confidence": 1.0}, "weighting": {"decay": {"gamma": 4}}}
DOMINO = {"terms": {"ce": {"weight": [0, 1, 1.0]}, "base_ce": {"weight": [1, 0, 1.0]}}}


@pytest.mark.parametrize(
    "parts, loss",
    [
        ({"corrector": {"name": "markov", "rank": 4}, "confidence": {"with_markov": True}}, DSPARK),
        ({"corrector": {"name": "gru", "rank": 4, "hidden_size": 4}}, DOMINO),
    ],
    ids=["dspark", "domino"],
)
def test_parts_are_trained_alone_on_a_trained_drafter_and_jointly(parts, loss, config, tmp_path):
    still = ("trainer.eval_strategy=no", "trainer.load_best_model_at_end=false", "trainer.save_strategy=no")
    call("train", config, *still, "trainer.max_steps=2", f"trainer.output_dir={tmp_path / 'plain'}")
    values = yaml.safe_load(config.read_text())
    values.update(loss=loss, train_only=list(parts), drafter={"init_from": str(tmp_path / "plain"), **parts})
    values["trainer"].update(warmup_steps=0, max_steps=3)
    config.write_text(yaml.safe_dump(values))
    call("train", config, *still)
    plain, grown = (AutoDrafter.from_pretrained(tmp_path / name).state_dict() for name in ("plain", "out"))
    assert all(torch.equal(grown[name], tensor) for name, tensor in plain.items())
    last = {"markov": "markov_w2.weight", "gru": "embed_proj.2.weight"}[parts["corrector"]["name"]]
    assert bool(grown[f"corrector.{last}"].any())  # which start at zero
    assert {name.split(".")[0] for name in grown.keys() - plain.keys()} == set(parts)
    log = json.loads((tmp_path / "out" / "training_log.json").read_text())
    assert {f"term_{name}" for name in loss["terms"]} <= log[0].keys()
    call("train", config, *still, "train_only=[]", f"trainer.output_dir={tmp_path / 'joint'}")
    joint = AutoDrafter.from_pretrained(tmp_path / "joint").state_dict()
    assert not torch.equal(joint["fc.weight"], plain["fc.weight"])
    assert bool(joint[f"corrector.{last}"].any())


EAGLE3 = {"family": "eagle3", "token_residual": True, "own_head": True, "num_assistant_tokens": 3}


def test_start_texts_and_freeze_shape_a_new_drafter(config, place, tmp_path):
    values = yaml.safe_load(config.read_text())
    values.update(drafter=EAGLE3, start_texts=4, freeze=["lm_head", "fc"], loss={"terms": "soft_ce"})
    values["trainer"].update(max_steps=3, eval_strategy="no", load_best_model_at_end=False, warmup_steps=0)
    config.write_text(yaml.safe_dump(values))
    started = TrainConfig.read(config).build().drafter
    # The map of the first 4 texts, which frozen modules keep.
    plain = TrainConfig.read(config, ["start_texts=0"]).build().drafter
    fewer = TrainConfig.read(config, ["start_texts=2"]).build().drafter
    assert not torch.equal(started.fc.weight, plain.fc.weight)
    assert not torch.equal(started.fc.weight, fewer.fc.weight)
    call("capture", config, "--out", tmp_path / "features")
    captured = TrainConfig.read(config, [f"features={tmp_path / 'features'}"]).build().drafter
    torch.testing.assert_close(captured.fc.weight, started.fc.weight, atol=1e-4, rtol=1e-3)
    call("train", config)
    trained = AutoDrafter.from_pretrained(tmp_path / "out")
    for name, moved in (("lm_head", False), ("fc", False), ("fc_next", True), ("layers.0.mlp.down_proj", True)):
        same = torch.equal(trained.get_submodule(name).weight, started.get_submodule(name).weight)
        assert same != moved, name
    values.update(drafter={"init_from": str(tmp_path / "out")})
    config.write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match="start_texts is for a new drafter"):
        call("train", config, f"trainer.output_dir={tmp_path / 'again'}")


def test_a_draft_vocabulary_must_be_the_targets(config, place, tmp_path):
    chosen = Vocabulary(torch.arange(3, 67), torch.ones(256, dtype=torch.long))
    chosen.save(tmp_path / "vocabulary")
    Vocabulary(chosen.ids, torch.ones(300, dtype=torch.long)).save(tmp_path / "other")
    with pytest.raises(ValueError, match="for a target of 300 tokens, and this one has 256"):
        call("train", config, f"draft_vocab={tmp_path / 'other'}")
    # A drafter of another width cannot copy the rows, but drafts the same tokens.
    narrow = ("drafter.hidden_size=16", "drafter.own_embeddings=true")
    for width in ((), narrow):
        drafter = TrainConfig.read(config, [f"draft_vocab={tmp_path / 'vocabulary'}", *width]).build().drafter
        assert torch.equal(drafter.draft_token_ids, chosen.ids)


def test_data_of_another_template_are_told(config, place, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("hf_specdraft.training.config.logger.warning", lambda text, *args: said.append(text % args))
    TrainConfig.read(config).build()
    assert not said
    other = shutil.copytree(place / "target", tmp_path / "other")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    tokenizer.save_pretrained(other)
    drafter = TrainConfig.read(config, [f"target={other}"]).build().drafter
    assert len(said) == 1 and "fewer drafts will be accepted" in said[0]
    # What it was trained on is what the answers were written in.
    assert drafter.config.chat_template_sha256 == load(place / "answers")[2]["chat_template_sha256"]


def test_data_of_another_target_are_refused(config, place, tmp_path):
    smaller = tmp_path / "smaller"
    make_target(vocab_size=64).save_pretrained(smaller)
    byte_tokenizer().save_pretrained(smaller)
    with pytest.raises(ValueError, match="outside the target's vocabulary of 64; they were made for another model"):
        call("train", config, f"target={smaller}", "drafter.mask_token_id=63")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learning_rte=1", r"trainer.learning_rte is unknown; did you mean learning_rate\?"),
        ("drafter.blocksize=4", r"drafter.blocksize is unknown; did you mean block_size\?"),
        ("drafter.family=blok", r"drafter.family.blok is unknown; did you mean block\?"),
        ("loss.term=ce", r"loss.term is unknown; did you mean terms\?"),
        ("unroll.anchor=3", r"unroll.anchor is unknown; did you mean anchors\?"),
        ("eval_prompts.files=x", r"eval_prompts.files is unknown; did you mean file\?"),
        ("target.revison=x", r"target.revison is unknown; did you mean revision\?"),
        ("lossy=1", r"lossy is unknown; did you mean loss\?"),
        ("lora.rank=2", r"lora.rank is unknown; did you mean"),
        ("loss.terms=cee", "cee"),
        ("drafter=block", "drafter must be a section of keys, but it is 'block'"),
        ("trainer.output_dir=", "trainer has no output_dir"),
        ("drafter.init_from=x", "either family .* or init_from"),
        ("lora.r=2", "lora adapts a trained drafter"),
        ("data=nowhere", "nowhere is no data folder"),
        ("target=./nowhere", "nowhere"),
        ("features=nowhere", "nowhere holds no captured features"),
        ("eval_prompts=nowhere", "nowhere"),
        ("drafter.num_target_layers=9", "built for a target of 9 layers but the target has 4"),
        ("trainer", "expected key=value such as"),
        ("start_texts=many", "start_texts must be a number, but it is 'many'"),
        ("freeze=lm_head", r"freeze must be a list of modules, such as \[lm_head\]"),
        ("freeze=[layrs]", r"freeze.layrs is unknown; did you mean layers\?"),
        ("trainer.eval_unroll.anchor=3", r"trainer.eval_unroll.anchor is unknown; did you mean anchors\?"),
        ("trainer.max_steps=many", "trainer.max_steps must be a number, but it is 'many'"),
        ("trainer.bf16=1", "trainer.bf16 must be true or false, but it is 1"),
        ("drafter.block_size=x", "drafter.block_size must be a number, but it is 'x'"),
        ("unroll.anchors=many", "unroll.anchors must be a number, but it is 'many'"),
        ("target.dtype=floaty", "target.dtype must be auto or one of torch's.* 'floaty'"),
        ("draft_vocab=nowhere", "nowhere holds no draft vocabulary"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(override, message, config, tmp_path):
    with pytest.raises((ValueError, OSError), match=message):
        call("train", config, override)
    assert not (tmp_path / "out").exists()


def test_a_full_disk_names_the_file(config, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        with pytest.raises(OSError, match=f"cannot write train.yaml to {tmp_path / 'out'} .*; make room on the disk"):
            call("train", config, "trainer.report_to=none")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "out").iterdir())


def test_a_config_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no config file"):
        call("train", tmp_path / "none.yaml")
    (tmp_path / "text.yaml").write_text("hello")
    with pytest.raises(ValueError, match="must hold keys such as target"):
        call("train", tmp_path / "text.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match="is not valid YAML"):
        call("train", tmp_path / "broken.yaml")


def test_values_are_read_as_yaml_1_2_has_them(config):
    given = {"learning_rate": "6e-4", "weight_decay": "1.5E-3", "eval_strategy": "no", "bf16": "true", "seed": "7"}
    read = TrainConfig.read(config, [f"trainer.{key}={value}" for key, value in given.items()]).trainer
    assert [read[key] for key in given] == [6e-4, 1.5e-3, "no", True, 7]
