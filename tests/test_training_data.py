"""Chats to tokens and loss masks, answers to data folders, rows to batches; and the `data` command from end to end."""

from __future__ import annotations

import errno
import json
import re
import resource

import pytest
import torch
from conftest import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_specdraft import cli
from hf_specdraft.training import data
from hf_specdraft.training.answers import AnswerFile
from hf_specdraft.training.conversations import ChatEncoder, Written

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if plain is defined %}[{{ plain }}]{% endif %}{% endif %}"
)
# Both write what CHATML does. The first leaves the stop token out of its marks, the second runs on behind it.
MARKED_SHORT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
)
MARKED_LONG = MARKED_SHORT.replace("{% endgeneration %}", "<|im_end|>\n{% endgeneration %}").replace(
    "{{ m.content }}{% endif %}<|im_end|>\n", "{{ m.content }}<|im_end|>\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Ends the whole chat with another token than each turn.
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}<|endoftext|>{% endif %}"
)
# Shows the thoughts of the last turn only, as Qwen3 does.
RETHINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Opens a thought in the prompt, and drops it from the chat.
OPENING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
STOPLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKS = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<bos>"]

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and"},
    {"role": "assistant", "content": "no"},
]


def byte_tokenizer(template: str | None = CHATML, eos: str = "<|im_end|>", merges=()) -> PreTrainedTokenizerFast:
    """One token per byte, merges as given, and the special tokens of all templates here."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*alphabet, *(a + b for a, b in merges)])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.add_special_tokens({"eos_token": eos, "pad_token": "<|endoftext|>", "bos_token": "<bos>"})
    tokenizer.chat_template = template
    return tokenizer


def supervised(tokenizer, sample) -> list[str]:
    """The runs of supervised tokens, as text."""
    runs, previous = [], False
    for token, written in zip(sample.ids, sample.mask):
        if written:
            runs.append([token] if not previous else [*runs.pop(), token])
        previous = written
    return [tokenizer.decode(run) for run in runs]


# masks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template, eos, stop",
    [
        (CHATML, "<|im_end|>", "<|im_end|>"),
        (CHATML, "<|endoftext|>", "<|im_end|>"),
        (MARKED_SHORT, "<|im_end|>", "<|im_end|>"),
        (MARKED_LONG, "<|im_end|>", "<|im_end|>"),
        (GEMMA, "<|endoftext|>", "<end_of_turn>"),
        (PHI, "<|endoftext|>", "<|end|>"),
    ],
)
def test_both_answers_and_their_stop_tokens_are_supervised_and_nothing_else(template, eos, stop):
    """Field case 55."""
    tokenizer = byte_tokenizer(template, eos)
    (sample,) = ChatEncoder(tokenizer).encode(CHAT)
    assert supervised(tokenizer, sample) == ["yes" + stop, "no" + stop]
    whole = tokenizer.apply_chat_template(CHAT)["input_ids"]
    assert sample.ids == whole[: len(sample.ids)] and sample.ids[-1] == tokenizer.convert_tokens_to_ids(stop)


def test_labels_are_those_that_a_decode_round_meets():
    """Field case 54: the pairs (what stands before, label), the first of them at the last token of the prompt."""
    tokenizer = byte_tokenizer()
    encoder = ChatEncoder(tokenizer)
    prompt = encoder.prompt(CHAT[:1])
    (sample,) = encoder.encode(CHAT[:2])
    labels = [i for i, written in enumerate(sample.mask) if written]
    answer = tokenizer("yes<|im_end|>")["input_ids"]
    assert [(sample.ids[:i], sample.ids[i]) for i in labels] == [
        (prompt + answer[:n], label) for n, label in enumerate(answer)
    ]


def test_tokens_that_the_target_wrote_are_kept_as_they_are():
    tokenizer = byte_tokenizer(merges=[("n", "o")])
    encoder = ChatEncoder(tokenizer)
    spelt, merged = tokenizer.convert_tokens_to_ids(["n", "o"]), tokenizer.convert_tokens_to_ids(["no"])
    assert encoder.encode(CHAT)[0].ids[-2:-1] == merged
    yes = tokenizer("yes")["input_ids"]
    (sample,) = encoder.encode(CHAT, {1: Written(yes), 3: Written(spelt)})
    assert sample.ids[-3:-1] == spelt
    assert supervised(tokenizer, sample) == ["yes<|im_end|>", "no<|im_end|>"]
    # What the target reads before its second answer is that row up to there.
    assert encoder.prompt(CHAT[:3], {1: Written(yes)}) == sample.ids[:-3]
    # Only turns that the target wrote count.
    (second,) = encoder.encode(CHAT, {3: Written(spelt)})
    assert supervised(tokenizer, second) == ["no<|im_end|>"] and second.ids == sample.ids


def test_a_stop_token_counts_once_and_only_where_the_target_wrote_it():
    tokenizer = byte_tokenizer()
    encoder = ChatEncoder(tokenizer)
    ids = tokenizer("yes")["input_ids"]
    cut = encoder.encode(CHAT[:2], {1: Written(ids, finished=False)})[0]
    assert supervised(tokenizer, cut) == ["yes"] and cut.ids[-1] == ids[-1]
    # A server gives the stop token among the tokens.
    given = encoder.encode(CHAT[:2], {1: Written([*ids, encoder.stop])})[0]
    assert supervised(tokenizer, given) == ["yes<|im_end|>"]
    # The target stopped with another end token than its template's.
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    sample = encoder.encode(CHAT, {1: Written([*ids, other]), 3: Written(ids)})[0]
    assert supervised(tokenizer, sample) == ["yes<|endoftext|>", "yes<|im_end|>"]


@pytest.mark.parametrize("template", [RETHINKING, OPENING])
def test_turns_that_the_template_renders_anew_become_documents_of_their_own(template):
    tokenizer = byte_tokenizer(template)
    chat = [dict(m, content="hm</think>" + m["content"]) if m["role"] == "assistant" else m for m in CHAT]
    encoder = ChatEncoder(tokenizer)
    samples = encoder.encode(chat)
    assert [supervised(tokenizer, s) for s in samples] == [["hm</think>yes<|im_end|>"], ["hm</think>no<|im_end|>"]]
    for sample, before in zip(samples, (chat[:1], chat[:3])):
        prompt = encoder.prompt(before)
        assert sample.ids[: len(prompt)] == prompt and not any(sample.mask[: len(prompt)])


def test_an_answer_is_tokenised_apart_from_the_prompt_that_it_would_merge_with():
    tokenizer = byte_tokenizer(merges=[("Ċ", "y")])
    encoder = ChatEncoder(tokenizer)
    (sample,) = encoder.encode(CHAT[:2])
    prompt = encoder.prompt(CHAT[:1])
    assert tokenizer.convert_tokens_to_ids("Ċy") in tokenizer.apply_chat_template(CHAT[:2])["input_ids"]
    assert sample.ids[: len(prompt)] == prompt and supervised(tokenizer, sample) == ["yes<|im_end|>"]


def test_template_arguments_reach_the_prompt_and_the_record():
    encoder = ChatEncoder(byte_tokenizer(), {"plain": "fast"})
    assert encoder.tokenizer.decode(encoder.prompt(CHAT[:1])).endswith("assistant\n[fast]")
    about = encoder.about()
    assert about["chat_template_kwargs"] == {"plain": "fast"} and len(about["chat_template_sha256"]) == 64


def test_without_stop_token_or_template_the_tokenizers_end_token_ends_the_answer():
    for template, chat in ((STOPLESS, CHAT), (None, CHAT[:2])):
        tokenizer = byte_tokenizer(template)
        samples = ChatEncoder(tokenizer).encode(chat)
        expected = [["yes<|im_end|>"], ["no<|im_end|>"]]
        assert [supervised(tokenizer, s) for s in samples] == expected[: len(samples)]
    with pytest.raises(ValueError, match="no chat template"):
        ChatEncoder(byte_tokenizer(None)).encode(CHAT)


def test_nothing_and_everything_supervised_are_errors():
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match="0 %"):
        ChatEncoder(tokenizer).encode(CHAT[:1])
    with pytest.raises(ValueError, match="0 %"):
        ChatEncoder(tokenizer).encode(CHAT[:2], {1: Written([], finished=False)})
    everything = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    with pytest.raises(ValueError, match="100 %"):
        ChatEncoder(byte_tokenizer(everything)).encode(CHAT)
    tokenizer = byte_tokenizer(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    )
    with pytest.raises(ValueError, match="refuses this chat: no system"):
        ChatEncoder(tokenizer).encode([{"role": "system", "content": "s"}, *CHAT])


# folders --------------------------------------------------------------------------------------------------------------


def answers(n: int, words: int = 3) -> list[dict]:
    return [
        {
            "id": str(i),
            "source": "test",
            "prompt": f"number {i}",
            "answer": f"a{i} " * words,
            "temperature": i % 2 * 0.8,
        }
        for i in range(n)
    ]


def prepared(tmp_path, rows, **options):
    about = data.prepare(rows, byte_tokenizer(), tmp_path / "data", **options)
    train, held_out, stored = data.load(tmp_path / "data")
    assert stored == about
    return train, held_out, about


def test_a_folder_holds_the_rows_and_says_whose_they_are(tmp_path):
    train, held_out, about = prepared(tmp_path, answers(40), held_out=0.25, about={"target": "t", "revision": "r"})
    assert set(train.column_names) == {"id", "source", "index", "input_ids", "loss_mask", "document_ids"}
    assert set(train["id"]).isdisjoint(held_out["id"]) and len(train) + len(held_out) == 40 and len(held_out) > 3
    assert about["target"] == "t" and about["temperatures"] == {"0": 20, "0.8": 20}
    counts = about["splits"]["train"]
    assert counts["tokens"] == sum(map(len, train["input_ids"])) and counts["rows"] == counts["documents"] == len(train)
    assert counts["supervised_tokens"] == sum(map(sum, train["loss_mask"]))
    assert json.loads((tmp_path / "data/train/specdraft.json").read_text()) == about
    # Whatever the order and company, a prompt stays on its side, and so do all its samples.
    again = [dict(row, id=f"{row['id']}#{k}", answer=f"{row['answer']}{k}") for row in answers(40) for k in (0, 1)]
    _, both, _ = prepared(tmp_path, again[::-1], held_out=0.25)
    assert {i.split("#")[0] for i in both["id"]} == set(held_out["id"]) and len(both) == 2 * len(held_out)


def test_packed_rows_hold_the_same_documents_and_collate_keeps_them_apart(tmp_path):
    rows = [row for n in range(1, 12) for row in [dict(answers(1, words=3 * n)[0], id=f"n{n}", prompt=f"p {n}")]]
    plain, _, about = prepared(tmp_path, rows, held_out=0)
    train, _, packed_about = prepared(tmp_path, rows, held_out=0, length=256, pack=True)
    assert len(train) < len(plain) == 11 and max(map(len, train["input_ids"])) <= 256
    for key in ("documents", "tokens", "supervised_tokens"):
        assert packed_about["splits"]["train"][key] == about["splits"]["train"][key]
    batch = data.collate(list(train), pad_token_id=7)
    documents = {}
    for b in range(len(train)):
        for number, name in enumerate(train[b]["id"].split("+"), 1):
            inside = batch["document_ids"][b] == number
            documents[name] = (batch["input_ids"][b][inside].tolist(), batch["loss_mask"][b][inside].tolist())
            assert batch["position_ids"][b][inside].tolist() == list(range(inside.sum()))
        padding = batch["document_ids"][b] == 0
        assert (batch["input_ids"][b][padding] == 7).all() and not batch["loss_mask"][b][padding].any()
    assert documents == {row["id"]: (row["input_ids"], row["loss_mask"]) for row in plain}
    assert max(batch["document_ids"].flatten()) > 1 and batch["index"].tolist() == list(range(len(train)))


def test_long_chats_become_windows_that_supervise_each_token_once(tmp_path):
    row = dict(answers(1, words=60)[0], prompt="long " * 40)
    whole, _, about = prepared(tmp_path, [row], held_out=0)
    train, _, cut = prepared(tmp_path, [row], held_out=0, length=64)
    assert len(train) > 3 and max(map(len, train["input_ids"])) <= 64 and all(map(any, train["loss_mask"]))
    assert cut["splits"]["train"]["supervised_tokens"] == about["splits"]["train"]["supervised_tokens"]
    learnt = [t for r in train for t, written in zip(r["input_ids"], r["loss_mask"]) if written]
    assert learnt == [t for t, written in zip(whole[0]["input_ids"], whole[0]["loss_mask"]) if written]
    # Windows of the prompt alone are gone, and a later window begins with what stood before its first label.
    assert not any(mask[0] for mask in train["loss_mask"])
    assert not any(any(mask[:16]) for mask in train["loss_mask"])


def test_known_repeated_and_empty_rows_are_dropped_and_counted(tmp_path):
    passage = "one two three four five six seven eight nine ten eleven twelve"
    held = tmp_path / "eval.jsonl"
    evaluation = [{"id": 1, "category": "c", "turns": ["What is NEW, today?", passage]}]
    held.write_text("".join(json.dumps(r) + "\n" for r in evaluation))
    extra = [
        {"id": "same", "prompt": "what is new today", "answer": "x"},
        {"id": "near", "prompt": f"Please read this: {passage}. Then sum up.", "answer": "x"},
        {"id": "far", "prompt": "one two three four five six seven, and then something else altogether", "answer": "x"},
        {"id": "empty", "prompt": "say nothing", "answer": "", "answer_ids": [], "finished": True},
        dict(answers(1)[0], id="again"),
    ]
    train, _, about = prepared(tmp_path, answers(3) + extra, held_out=0, dedupe=held)
    assert set(train["id"]) == {"0", "1", "2", "far"}
    assert about["dropped"] == {"known from the evaluation": 2, "without an answer": 1, "there twice": 1}


def test_rows_of_every_form_are_read(tmp_path):
    tokenizer = byte_tokenizer()
    ids = [tokenizer(text)["input_ids"] for text in ("yes", "no")]
    rows = [
        {"id": "chat", "messages": CHAT},
        {
            "id": "turns",
            "turns": ["hi there", "and"],
            "answers": ["yes", "no"],
            "answer_ids": ids,
            "finished": [True, False],
        },
        {"id": "one", "turns": ["hello", "never asked"], "answers": ["yes"], "answer_ids": ids[:1], "finished": [True]},
        {
            "id": "history",
            "messages": [*CHAT[:2], {"role": "user", "content": "so"}],
            "answer": "no",
            "answer_ids": ids[1],
        },
    ]
    # As datasets has them: every field in every row.
    fields = {key for row in rows for key in row}
    train, _, _ = prepared(tmp_path, [{key: row.get(key) for key in fields} for row in rows], held_out=0)
    said = {}
    for row in train:
        said[row["id"]] = re.sub(
            r"\x00+",
            "|",
            "".join(tokenizer.decode([t]) if w else "\x00" for t, w in zip(row["input_ids"], row["loss_mask"])),
        )
    assert said == {
        "chat": "|yes<|im_end|>|no<|im_end|>",
        "turns": "|yes<|im_end|>|no",
        "one": "|yes<|im_end|>",
        "history": "|no<|im_end|>",
    }


@pytest.mark.parametrize(
    "rows, message",
    [
        ([], "no row is left to train on"),
        ([{"id": "a", "prompt": "p", "answer": ""}], "no row is left to train on .1 without an answer"),
        ([{"id": "a", "prompt": "p"}], "row 'a': it has no answer"),
        ([{"id": "a", "messages": CHAT[:1]}], "row 'a': its messages do not end"),
        ([{"id": "a", "question": "p", "answer": "x"}], "row 'a': prompt 'a': expected `prompt`"),
        (["text"], "row 1: expected an object"),
        ("/nowhere/answers.jsonl", "no such file or folder"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        data.prepare(rows, byte_tokenizer(), tmp_path / "data")
    assert not (tmp_path / "data").exists()
    with pytest.raises(ValueError, match="is no data folder"):
        data.load(tmp_path)


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    before = prepared(tmp_path, answers(5), held_out=0)[0].to_dict()
    from datasets import DatasetDict

    def full(self, folder):
        (tmp_path / "data/.partial/train").mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(DatasetDict, "save_to_disk", full)
        with pytest.raises(OSError, match="No space left on device; no data was written"):
            prepared(tmp_path, answers(9), held_out=0)
    assert not (tmp_path / "data/.partial").exists()
    assert data.load(tmp_path / "data")[0].to_dict() == before
    # And data that is there is replaced whole.
    assert len(prepared(tmp_path, answers(9), held_out=0)[0]) == 9


# the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("target")
    tokenizer = byte_tokenizer()
    tiny_llama(vocab=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def call(*arguments):
    result = CliRunner().invoke(cli.app, ["data", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_goes_from_prompts_to_a_folder(target, tmp_path):
    prompts, held = tmp_path / "prompts.jsonl", tmp_path / "eval.jsonl"
    rows = [{"prompt": f"count to {i}", "id": f"p{i}"} for i in range(6)]
    prompts.write_text("".join(json.dumps(r) + "\n" for r in rows))
    held.write_text(json.dumps({"prompt": "Count to 3!"}) + "\n")
    out = tmp_path / "out"
    ask = ("--target", target, "--prompts", prompts, "--out", out, "--dedupe", held, "--max-new-tokens", 8)
    said = call(*ask, "--pack", 128, "--held-out", 0, "--batch-size", 4)
    assert said.exit_code == 0 and re.search(r"train: \d+ rows, \d+ documents", said.stdout)
    train, held_out, about = data.load(out)
    assert held_out is None and about["target"] == target and about["prompts_known_from_evaluation"] == 1
    assert {i for row in train["id"] for i in row.split("+")} == {"p0", "p1", "p2", "p4", "p5"}
    assert set(about["temperatures"]) == {"0", "0.8"} and about["packed"] and len(about["prompts_sha256"]) == 64
    # From its own answers it makes the same data, and with other settings it does not go on.
    call(
        "--target",
        target,
        "--answers",
        out / "answers.jsonl",
        "--out",
        tmp_path / "again",
        "--held-out",
        0,
        "--pack",
        128,
    )
    assert data.load(tmp_path / "again")[0].to_dict() == train.to_dict()
    with pytest.raises(ValueError, match="max_new_tokens 8 .now 9.; continue with the same"):
        call(*ask[:-1], 9)
    with pytest.raises(ValueError, match=r"temperature \[0.0, 0.8\] .now \[0.0\]"):
        call(*ask, "--temperature", 0)
    with pytest.raises(ValueError, match="samples 1 .now 2."):
        call(*ask, "--samples", 2)


def test_the_command_stops_and_continues(target, tmp_path, monkeypatch):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"prompt": f"count to {i}"}) + "\n" for i in range(4)))
    ask = ("--target", target, "--prompts", prompts, "--out", out, "--max-new-tokens", 4, "--batch-size", 1)
    append = AnswerFile.append

    def interrupted(self, rows):
        if len(self.rows) == 2:
            raise KeyboardInterrupt
        append(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(AnswerFile, "append", interrupted)
        stopped = call(*ask)
    assert stopped.exit_code == 130 and "the same command continues" in " ".join(stopped.stderr.split())
    kept = (out / "answers.jsonl").read_text()
    assert len(kept.splitlines()) == 2 and not (out / "train").exists()
    assert call(*ask, "--held-out", 0).exit_code == 0
    assert (out / "answers.jsonl").read_text().startswith(kept) and len(data.load(out)[0]) == 4


@pytest.mark.parametrize("limit, kept", [(500, 3), (1600, 8)], ids=["answers", "data"])
def test_a_full_disk_costs_the_command_nothing_finished(target, tmp_path, limit, kept):
    """The operating system refuses a file in the middle: that of the answers, then one of the data."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text("".join(json.dumps({"prompt": f"count to {i}"}) + "\n" for i in range(8)))
    ask = ("--target", target, "--prompts", prompts, "--out", out, "--max-new-tokens", 4, "--batch-size", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(OSError, match="rows are kept, and the same call continues|the answers are kept"):
            call(*ask, "--held-out", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name for path in out.iterdir()} == {"answers.jsonl", "answers.settings.json"}
    rows = (out / "answers.jsonl").read_text()
    assert rows.endswith("\n") and rows.count("\n") == kept
    assert call(*ask, "--held-out", 0).exit_code == 0
    assert (out / "answers.jsonl").read_text().startswith(rows) and len(data.load(out)[0]) == 8


def test_the_command_says_what_is_wrong(target, tmp_path, monkeypatch, capsys):
    def main(*arguments):
        monkeypatch.setattr("sys.argv", ["hf-specdraft", "data", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, " ".join(capsys.readouterr().err.split())

    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    to = ("--target", target, "--out", tmp_path / "out")
    assert main(*to) == (
        1,
        "hf-specdraft: give either --answers, or prompts to answer: --prompts, --synthesise or both",
    )
    code, said = main(*to, "--prompts", empty)
    assert code == 1 and said == f"hf-specdraft: {empty} holds no rows"
    code, said = main(*to, "--prompts", empty, "--extra", "{")
    assert code == 1 and said.startswith("hf-specdraft: --extra {: not JSON")
    code, said = main(*to, "--prompts", tmp_path / "none.jsonl")
    assert code == 2 and "does not exist" in said
    code, said = main("--target", tmp_path / "none", "--out", tmp_path / "out", "--prompts", empty)
    assert code == 1 and "none" in said


def test_rows_may_hold_tensors():
    row = {
        "input_ids": torch.tensor([5, 6, 7]),
        "loss_mask": [False, True, True],
        "document_ids": torch.tensor([1, 2, 2]),
    }
    batch = data.collate([row], 0)
    assert batch["position_ids"].tolist() == [[0, 0, 1]] and "index" not in batch
