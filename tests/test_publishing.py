"""Cards of measured facts, folders that load anywhere, the Hub, and the warning about another chat template."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import tiny_llama
from hub_standin import TOKEN, StandIn
from huggingface_hub import ModelCard
from test_cli import TEMPLATE, byte_tokenizer, call
from transformers import AutoConfig, AutoModel

from hf_specdraft import AutoDrafter, BlockConfig, BlockDrafter, NgramConfig, NgramDrafter, cli, publishing
from hf_specdraft.publishing import Provenance, cards, template_mismatch, template_sha256

MODES = "{% for m in messages %}{{ m.content }}{% endfor %}{% if thinking is defined and thinking %}<t>{% endif %}>"


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama(vocab=256).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def drafter(**fields) -> BlockDrafter:
    torch.manual_seed(0)
    config = BlockConfig.tiny(vocab_size=256, draft_vocab_size=None, target_layer_ids=[-1, 0], **fields)
    return BlockDrafter(config).eval()


def bench_file(path: Path, *methods: str) -> Path:
    def row(category, method, tau, speed):
        spread = [speed, speed - 0.1, speed + 0.1]
        row = dict(category=category, method=method, prompts=8, tau=tau, tokens_per_second=20.0, equal=8, outside=0.1)
        return {**row, "to_plain": spread, "to_lookup": spread}

    about = {
        "versions": {"hf_specdraft": "0.1.0", "torch": "2.13.0"},
        "commit": "c0ffee",
        "machine": {"system": "Linux", "processor": "Xeon 9", "cores": 2, "threads": 1, "accelerator": "H200"},
        "settings": {
            "target": "org/target",
            "drafters": list(methods),
            "prompts": "spec_bench.jsonl",
            "prompts_sha256": "e8d52e403ecbb246",
            "per_category": 8,
            "max_new_tokens": 128,
            "repeats": 3,
            "dtype": "float32",
            "device": "cpu",
        },
    }
    rows = [row(c, "plain", 1.0, 1.0) for c in ("chat", "overall")]
    for i, method in enumerate(methods):
        rows += [row("chat", method, 1.75 + i, 0.9 + i), row("overall", method, 2.125 + i, 1.5 + i)]
    path.write_text(json.dumps({"about": about, "rows": rows, "records": [{"prompt": "1"}]}))
    return path


def text_of(folder: Path) -> str:
    return (folder / "README.md").read_text()


# Cards ----------------------------------------------------------------------------------------------------------------


def test_a_saved_drafter_has_a_card_that_invents_nothing(tmp_path):
    drafter().save_pretrained(tmp_path)
    text, data = text_of(tmp_path), ModelCard.load(tmp_path / "README.md").data
    assert "not measured on these weights" in text
    for fact in ("recipe", "command", "commit", "steps", "hardware", "versions", "chat template", "data"):
        assert f"| {fact} | not recorded |" in text
    assert data.library_name == "hf_specdraft" and data.pipeline_tag == "text-generation"
    assert {"speculative-decoding", "hf_specdraft", "block"} <= set(data.tags)
    assert data.base_model is None and data.license is None and data.eval_results is None
    assert not re.search(r"\d\.\d\d", text.partition("## Measured")[2])


def test_a_drafter_without_weights_claims_no_training(tmp_path):
    NgramDrafter(NgramConfig.tiny()).save_pretrained(tmp_path)
    assert "It has nothing to train." in text_of(tmp_path) and "not recorded |" not in text_of(tmp_path)


def test_the_card_tells_what_training_and_the_benchmark_left(tmp_path):
    folder = tmp_path / "mine"
    fields = dict(chat_template_sha256="ab" * 32, chat_template_kwargs={"enable_thinking": False})
    drafter(target_name="org/target", target_revision="1234abc", **fields).save_pretrained(folder)
    Provenance(
        recipe="demo",
        command="hf-specdraft train demo.yaml",
        commit="deadbeef",
        steps=400,
        data={"rows": 1500, "prompt_file_sha256": "77aa", "temperatures": [0.0, 0.7]},
        versions={"torch": "2.13.0"},
        hardware={"processor": "Xeon 9", "cores": 2, "threads": 1},
        seconds=600.0,
        notes=["Trained at 512 tokens; longer chats were not tried."],
    ).save(folder)
    said = call("card", folder, "--bench", bench_file(tmp_path / "b.json", "ngram", str(folder)), "--license", "mit")
    assert said.exit_code == 0 and "README.md" in said.stdout
    text = text_of(folder)
    for fact in (
        "| recipe | demo |",
        "| command | `hf-specdraft train demo.yaml` |",
        "| commit | deadbeef |",
        "| steps | 400 |",
        "| wall-clock time | 10.0 minutes |",
        "| hardware | Xeon 9, 2 cores, 1 threads used |",
        "| chat template | the chat template abababababab rendered with enable_thinking=False |",
        "| data: rows | 1500 |",
        "| data: temperatures | [0.0, 0.7] |",
        "`org/target`, revision 1234abc",
        "| `mine` | chat | 8 | 2.75 | 1.90 (1.80 to 2.00) | 1.90 (1.80 to 2.00) | 8 of 8 |",
        "H200, Xeon 9, 2 cores",
        "c0ffee",
        "longer chats were not tried",
        "Slower than plain generate there: in no domain measured.",
        'revision="1234abc"',
        "return_dict=True, enable_thinking=False",
    ):
        assert fact in text, fact
    assert "not recorded" not in text and "2.12" not in text  # ngram's rows are not this drafter's
    data = ModelCard.load(folder / "README.md").data
    assert data.base_model == "org/target" and data.license == "mit"
    results = {(r.dataset_name, r.dataset_config, r.metric_type): r.metric_value for r in data.eval_results}
    assert results["spec_bench.jsonl", "chat", "tau"] == 2.75
    assert results["spec_bench.jsonl", "overall", "speedup"] == 2.5


def test_measurements_belong_to_the_weights_they_were_made_with(tmp_path):
    folder = tmp_path / "mine"
    mine = drafter()
    mine.save_pretrained(folder)
    methods = "/tmp/elsewhere:policy=fixed", "ngram+/tmp/elsewhere"
    publishing.measure(folder, bench_file(tmp_path / "b.json", "ngram", *methods), methods)
    publishing.write_card(folder, license="mit")
    assert "| `elsewhere:policy=fixed` | chat | 8 | 2.75 |" in text_of(folder) and "/tmp" not in text_of(folder)
    assert "| `ngram+elsewhere` | chat | 8 | 3.75 |" in text_of(folder) and "1.75" not in text_of(folder)
    assert {r.metric_value for r in ModelCard.load(folder / "README.md").data.eval_results} == {2.75, 3.125, 1.9, 2.5}
    Provenance(recipe="first").save(folder)
    # The same weights elsewhere: the facts go with them.
    loaded = AutoDrafter.from_pretrained(folder)
    loaded.save_pretrained(tmp_path / "copy")
    assert "| chat | 8 | 2.75 |" in text_of(tmp_path / "copy") and "| recipe | first |" in text_of(tmp_path / "copy")
    # Other weights: neither there nor in their own folder.
    with torch.no_grad():
        loaded.norm.weight[0] += 1
    for place in (tmp_path / "tuned", folder):
        loaded.save_pretrained(place)
        assert "not measured on these weights" in text_of(place) and "2.75" not in text_of(place)
    assert "| recipe | not recorded |" in text_of(tmp_path / "tuned")
    assert ModelCard.load(folder / "README.md").data.license == "mit"


def test_the_card_says_where_the_drafter_does_not_pay(tmp_path):
    drafter().save_pretrained(tmp_path / "mine")
    publishing.measure(tmp_path / "mine", bench_file(tmp_path / "b.json", "mine"), ["mine"])
    publishing.write_card(tmp_path / "mine")
    assert "Slower than plain generate there: chat (`mine`)." in text_of(tmp_path / "mine")


def test_a_card_written_by_hand_stays(tmp_path):
    mine = drafter()
    mine.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("# By hand\n")
    mine.save_pretrained(tmp_path)
    assert text_of(tmp_path) == "# By hand\n"
    with pytest.raises(ValueError, match="written by hand"):
        call("card", tmp_path)


def test_the_cards_code_runs(tmp_path, target, monkeypatch, capsys):
    drafter(target_name=target).save_pretrained(tmp_path / "tiny")
    (code,) = re.findall(r"```python\n(.*?)```", text_of(tmp_path / "tiny"), re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {})
    assert "tokens per target pass:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content, message",
    [("{", "is no benchmark"), ("[]", "is no benchmark"), ("a, b", "of which 0 name"), ("c:policy=fixed", "say which")],
)
def test_refuses_benchmarks_of_others(tmp_path, content, message):
    drafter().save_pretrained(tmp_path / "mine")
    file = bench_file(tmp_path / "b.json", *content.split(", "))
    if content in ("{", "[]"):
        file.write_text(content)
    with pytest.raises(ValueError, match=message):
        call("card", tmp_path / "mine", "--bench", file)
    with pytest.raises(ValueError, match="but not other" if "," in content or ":" in content else message):
        call("card", tmp_path / "mine", "--bench", file, "--method", "other")
    assert not (tmp_path / "mine" / cards.BENCH).exists()


def test_wrong_folders_are_named(tmp_path, target):
    (tmp_path / "empty").mkdir()
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "config.json").write_text("[]")
    cases = {tmp_path / "nowhere": "there is no folder", tmp_path / "empty": "holds no drafter"}
    cases |= {Path(target): "holds no drafter", tmp_path / "list": "holds no drafter"}
    foreign = Path(__file__).parent / "fixtures" / "dflash-zlab" / "drafter"
    for folder, message in {**cases, foreign: "another project's format"}.items():
        with pytest.raises(ValueError, match=message):
            publishing.write_card(folder)
    for folder, message in cases.items():
        with pytest.raises(ValueError, match=message):
            publishing.push(folder, "someone/thing", token=TOKEN)


def test_broken_provenance_is_named(tmp_path):
    assert Provenance.load(tmp_path) is None
    Provenance.here(recipe="r").save(tmp_path)
    here = Provenance.load(tmp_path)
    assert here.recipe == "r" and here.versions["torch"] == torch.__version__ and here.hardware["cores"]
    for content, message in (("{", "cannot be read"), ('{"speed": 1}', "does not know: speed")):
        (tmp_path / "training.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            Provenance.load(tmp_path)


# Loading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [drafter, lambda **f: NgramDrafter(NgramConfig.tiny(**f))])
def test_plain_auto_classes_load_a_saved_folder(tmp_path, make):
    fields = dict(target_name="org/t", target_revision="1", chat_template_sha256="", chat_template_kwargs={"a": [1]})
    mine = make(**fields)
    mine.save_pretrained(tmp_path / "one")
    for trust in (None, True):
        config = AutoConfig.from_pretrained(tmp_path / "one", trust_remote_code=trust)
        assert {key: getattr(config, key) for key in fields} == fields
        loaded = AutoModel.from_pretrained(tmp_path / "one", trust_remote_code=trust)
        assert type(loaded) is type(mine)
    loaded.save_pretrained(tmp_path / "two")
    names = {f.name for f in (tmp_path / "one").iterdir()}
    assert {f.name for f in (tmp_path / "two").iterdir()} == names
    assert "modeling_specdraft.py" in names and len([n for n in names if n.endswith(".py")]) == 1
    one, two = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("one", "two"))
    assert one == two


REMOTE = """
import sys
from transformers import AutoConfig, AutoModel
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == "hf_specdraft":
            raise ModuleNotFoundError("No module named 'hf_specdraft'", name=name)
sys.meta_path.insert(0, Hidden())
try:
    AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    assert "pip install hf_specdraft" in str(error), error
else:
    raise SystemExit("loaded without the package")
sys.meta_path.pop(0)
assert "hf_specdraft" not in sys.modules
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
import hf_specdraft
assert type(model) is hf_specdraft.BlockDrafter and type(config) is hf_specdraft.BlockConfig
model.save_pretrained(sys.argv[2])
print("loaded")
"""


def test_trust_remote_code_loads_a_folder_where_nobody_imported_us(tmp_path):
    drafter().save_pretrained(tmp_path / "one")
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, "-c", REMOTE, str(tmp_path / "one"), str(tmp_path / "two")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1] == "loaded", ran.stderr
    assert {f.name for f in (tmp_path / "two").iterdir()} == {f.name for f in (tmp_path / "one").iterdir()}


def test_facts_of_the_working_directory_are_nobodys(tmp_path, monkeypatch):
    drafter().save_pretrained(tmp_path)
    Provenance(recipe="another's").save(tmp_path)
    monkeypatch.chdir(tmp_path)
    drafter().save_pretrained(tmp_path / "made")  # the same weights, but not loaded from here
    assert not (tmp_path / "made" / "training.json").exists()


# The Hub --------------------------------------------------------------------------------------------------------------

ONLINE = """
import json, sys
import hf_specdraft
from hf_specdraft import publishing, cli
from transformers import AutoModel
folder, port = sys.argv[1:3]
mine = hf_specdraft.AutoDrafter.from_pretrained(folder)
print(mine.push_to_hub("someone/object", private=True, tags=["demo"]))
sys.argv = ["hf-specdraft", "card", folder, "--push", "someone/folder", "--license", "mit"]
try:
    cli.main()
except SystemExit as stop:
    assert not stop.code, stop.code
print(publishing.push(folder, "someone/folder", revision="next"))
mine.save_pretrained(sys.argv[2] + "-again", push_to_hub=True, repo_id="someone/saved")
for load in (hf_specdraft.AutoDrafter, AutoModel):
    load.from_pretrained("someone/folder")
    load.from_pretrained("someone/folder", revision="next")
    try:
        load.from_pretrained("someone/folder", revision="gone")
    except OSError as error:
        assert "gone" in str(error), error
    else:
        raise SystemExit("a revision that is not there was loaded")
for name, token, words in (
    ("someone/refused", "hf_reader", ("status 401", "hf auth login")),
    ("no such name", "hf_writer", ("no repository name",)),
):
    try:
        publishing.push(folder, name, token=token)
    except ValueError as error:
        assert all(word in str(error) for word in words), error
    else:
        raise SystemExit(name + " was pushed")
print("done")
"""

OFFLINE = """
import sys
import hf_specdraft
from hf_specdraft import publishing
from transformers import AutoModel
for load in (hf_specdraft.AutoDrafter, AutoModel):
    assert load.from_pretrained("someone/folder").config.target_name == "org/target"
    assert load.from_pretrained("someone/folder", revision="next").config.target_name == "org/target"
    try:
        load.from_pretrained("someone/unseen")
    except OSError as error:
        assert "cached files" in str(error), error
        assert "someone/unseen" in str(error) or load is AutoModel, error
    else:
        raise SystemExit("loaded from nowhere")
try:
    publishing.push(sys.argv[1], "someone/folder")
except OSError as error:
    assert "HF_HUB_OFFLINE" in str(error), error
else:
    raise SystemExit("pushed offline")
print("done")
"""


def test_pushes_to_and_loads_from_the_hub(tmp_path):
    folder = tmp_path / "mine"
    mine = drafter(target_name="org/target", target_revision="77")
    mine.save_pretrained(folder)
    Provenance(recipe="demo").save(folder)
    (folder / "optimizer.pt").write_bytes(b"not for others")
    (folder / "trainer_state.json").write_text("{}")
    with StandIn() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
        command = [sys.executable, "-c", ONLINE, str(folder), str(tmp_path)]
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1] == "done", ran.stderr[-3000:]
    assert set(hub.repos) == {"someone/object", "someone/folder", "someone/saved"}
    assert hub.private == {"someone/object": True, "someone/folder": False, "someone/saved": False}
    names = {"README.md", "config.json", "model.safetensors", "modeling_specdraft.py", "training.json"}
    for branches in hub.repos.values():
        for files in branches.values():
            assert set(files) == names
            assert files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
            assert json.loads(files["config.json"])["target_revision"] == "77"
    assert set(hub.repos["someone/folder"]) == {"main", "next"}
    card = hub.repos["someone/object"]["main"]["README.md"].decode()
    assert 'AutoDrafter.from_pretrained("someone/object"' in card and "- demo\n" in card and "| recipe | demo |" in card
    card = hub.repos["someone/folder"]["main"]["README.md"].decode()
    assert 'AutoDrafter.from_pretrained("someone/folder"' in card and "license: mit" in card
    assert f"{hub.url}/someone/object/commit/" in ran.stdout

    environment |= {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", OFFLINE, str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1] == "done", ran.stderr[-3000:]


def test_a_missing_token_is_one_clear_line(tmp_path, monkeypatch, capsys):
    drafter().save_pretrained(tmp_path / "mine")
    monkeypatch.setattr(publishing.hub.huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(sys, "argv", ["hf-specdraft", "card", str(tmp_path / "mine"), "--push", "someone/thing"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr().err.splitlines()
    assert stop.value.code == 1 and len(said) == 1
    assert "HF_TOKEN" in said[0] and "hf auth login" in said[0]


def test_a_hub_that_does_not_answer_is_named(tmp_path, monkeypatch):
    drafter().save_pretrained(tmp_path)
    monkeypatch.setattr(publishing.hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OSError, match="http://127.0.0.1:9 cannot be reached"):
        publishing.push(tmp_path, "someone/thing", token=TOKEN)


# The chat template (S3) -----------------------------------------------------------------------------------------------


def tokenizer(template: str | None):
    made = byte_tokenizer()
    made.chat_template = template
    return made


def trained(template: str | None, kwargs: dict | None = None) -> BlockDrafter:
    return drafter(chat_template_sha256=template_sha256(tokenizer(template)), chat_template_kwargs=kwargs)


@pytest.mark.parametrize(
    "trained_on, kwargs, template, used, words",
    [
        (MODES, {}, MODES, {}, None),
        (MODES, {"thinking": False}, MODES, {}, None),  # a default written out
        (MODES, {"thinking": False}, MODES, {"unread": 1}, None),
        (MODES, {"thinking": False}, MODES, {"thinking": True}, ("thinking=False", "thinking=True")),
        (MODES, {"thinking": True}, MODES, {}, ("thinking=True", "in its default mode")),
        (MODES, {}, TEMPLATE, {}, (template_sha256(tokenizer(MODES))[:12], template_sha256(tokenizer(TEMPLATE))[:12])),
        (MODES, {}, MODES, None, ("these prompts use plain text",)),
        (MODES, {}, None, {}, ("these prompts use plain text",)),
        (None, {}, MODES, {}, ("trained on plain text",)),
        (None, {}, None, {}, None),
        (None, {}, MODES, None, None),
    ],
)
def test_says_when_prompts_are_not_those_of_training(trained_on, kwargs, template, used, words):
    said = template_mismatch(trained(trained_on, kwargs), tokenizer(template), used)
    assert (said is None) == (words is None)
    assert all(word in said for word in words or ())


def test_says_nothing_when_the_drafter_does_not():
    assert template_mismatch(drafter(), tokenizer(MODES), {"thinking": True}) is None


@pytest.mark.parametrize("command", ["card", "export"])
def test_the_commands_explain_themselves(command):
    said = call(command, "--help")
    assert said.exit_code == 0 and command in said.stdout


def test_commands_warn_once_and_take_the_mode(tmp_path, target):
    tokenizer(MODES).save_pretrained(tmp_path / "target")
    tiny_llama(vocab=256).save_pretrained(tmp_path / "target")
    trained(MODES, {"thinking": True}).save_pretrained(tmp_path / "mine")
    (tmp_path / "p.jsonl").write_text('{"id": 1, "category": "c", "turns": ["abc"]}\n')
    common = ("--target", tmp_path / "target", "--drafter", tmp_path / "mine", "--max-new-tokens", 4)
    mode = ("--chat-template-kwargs", '{"thinking": true}')
    for ask in (
        ("generate", *common, "hello"),
        ("check", *common, "--prompts", tmp_path / "p.jsonl"),
        ("bench", *common, "--prompts", tmp_path / "p.jsonl", "--json", tmp_path / "b.json"),
    ):
        said = call(*ask)
        assert said.exit_code == 0 and said.stderr.count("warning: the drafter was trained on") == 1, ask
        assert "warning: the drafter" not in call(*ask, *mode).stderr
    assert json.loads((tmp_path / "b.json").read_text())["about"]["settings"]["chat_template_kwargs"] == {
        "thinking": True
    }
    assert "warning: the drafter" in call("generate", *common, *mode, "--no-chat", "hello").stderr
    for bad in ("{", "[]"):
        assert call("generate", *common, "--chat-template-kwargs", bad, "hello").exit_code == 2
    said = call("inspect", tmp_path / "mine").stdout
    assert "rendered with thinking=True" in said and "warning" not in said and "does not say which" not in said
    assert "warning:" in call("inspect", tmp_path / "mine", "--tokenizer", tmp_path / "target").stdout
    assert "warning:" not in call("inspect", tmp_path / "mine", "--tokenizer", tmp_path / "target", *mode).stdout
