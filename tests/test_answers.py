"""Answers of a tiny target and of a stand-in for an OpenAI-compatible server; stopping, resuming, full disks."""

from __future__ import annotations

import errno
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import tiny_llama
from test_training_data import byte_tokenizer

from hf_specdraft.training import answers
from hf_specdraft.training.answers import AnswerFile, ChatPrompt, LocalWriter, ServerWriter, plan

PROMPTS = [
    {"id": "a", "prompt": "one"},
    {"id": "b", "category": "two turns", "turns": ["first", "then"]},
    {"id": "c", "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "short"}]},
    *({"id": f"p{i}", "prompt": "x" * i} for i in range(1, 8)),
]


def jobs(temperatures=None, samples=1, rows=PROMPTS):
    prompts = [ChatPrompt.from_row(row, n, "test") for n, row in enumerate(rows)]
    return plan(prompts, temperatures or {0.0: 1.0, 0.8: 1.0}, samples)


@pytest.fixture(scope="module")
def writer() -> LocalWriter:
    tokenizer = byte_tokenizer()
    target = tiny_llama(vocab=len(tokenizer))
    writer = LocalWriter(target, tokenizer, batch_size=4, max_new_tokens=12)
    # A random target rarely stops: let some common tokens be end tokens besides the template's.
    free = [token for ids, _ in writer._generate([[1, 2], [3, 4, 5]], 0, 1.0, 0) for token in ids]
    target.generation_config.eos_token_id = sorted({free[5], free[17]})
    return LocalWriter(target, tokenizer, batch_size=4, max_new_tokens=12)


def test_rows_are_the_targets_own_answers(writer, tmp_path):
    file = AnswerFile(tmp_path / "answers.jsonl")
    given = list(writer.write(jobs({0.0: 1.0}), file))
    rows = {row["id"]: row for row in answers.read_jsonl(file.path)}
    assert rows == {row["id"]: row for row in given} and set(rows) == {row["id"] for row in PROMPTS}
    finished = []
    for row in rows.values():
        if "turns" in row:
            continue
        chat = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
        prompt = writer.encoder.prompt(chat)
        inputs = writer.tokenizer.pad({"input_ids": [prompt]}, return_tensors="pt")
        alone = writer.target.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=writer.ends)
        wrote = alone[0, len(prompt) :].tolist()
        assert row["finished"] == (wrote[-1] in writer.ends) and row["temperature"] == 0
        assert row["answer_ids"] == wrote[: len(wrote) - (wrote[-1] == writer.encoder.stop)]
        assert row["answer"] == writer.tokenizer.decode(row["answer_ids"], skip_special_tokens=True)
        finished.append(row["finished"])
    assert {True, False} == set(finished)
    two = rows["b"]
    assert two["source"] == "two turns" and len(two["answers"]) == len(two["answer_ids"]) == len(two["finished"])
    # A turn that was cut off ends the chat.
    assert len(two["answers"]) == (2 if two["finished"][0] else 1)


def test_later_turns_read_the_earlier_answers_as_they_were_written(writer, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        LocalWriter, "_generate", lambda self, prompts, *_: [(asked.append(p) or [70, 71], True) for p in prompts]
    )
    (row,) = writer.write(jobs({0.0: 1.0}, rows=PROMPTS[1:2]), AnswerFile(tmp_path / "answers.jsonl"))
    assert row["answer_ids"] == [[70, 71]] * 2 and row["finished"] == [True, True]
    first, second = asked[-2:]
    assert second[: len(first) + 3] == [*first, 70, 71, writer.encoder.stop]
    assert writer.tokenizer.decode(second).endswith("user\nthen<|im_end|>\n<|im_start|>assistant\n")


def test_the_templates_stop_token_is_left_out_and_other_end_tokens_stay(writer):
    other = next(token for token in writer.ends if token != writer.encoder.stop)
    assert writer._cut([5, writer.encoder.stop, 6]) == ([5], True)
    assert writer._cut([5, other, 6]) == ([5, other], True)
    assert writer._cut([5, 6]) == ([5, 6], False)


def test_interrupted_and_resumed_equals_uninterrupted(writer, tmp_path):
    straight = AnswerFile(tmp_path / "straight.jsonl", writer.settings())
    list(writer.write(jobs(), straight))
    assert {row["temperature"] for row in straight.rows} == {0.0, 0.8}
    path = tmp_path / "resumed.jsonl"
    first = writer.write(jobs(), AnswerFile(path, writer.settings()))
    next(first)
    first.close()
    kept = path.read_bytes()
    # The machine went down in the middle of a line.
    path.write_bytes(kept + b'{"id": "p9", "answ')
    file = AnswerFile(path, writer.settings())
    assert path.read_bytes() == kept and len(file.rows) == 4
    assert len(list(writer.write(jobs(), file))) == len(PROMPTS) - 4
    assert path.read_bytes() == straight.path.read_bytes()
    assert list(writer.write(jobs(), AnswerFile(path))) == []


def test_a_batch_that_was_written_in_part_is_completed(writer, tmp_path):
    straight = AnswerFile(tmp_path / "straight.jsonl")
    list(writer.write(jobs(), straight))
    lines = straight.path.read_bytes().splitlines(keepends=True)
    path = tmp_path / "resumed.jsonl"
    path.write_bytes(b"".join([*lines[:2], lines[2][:-9]]))
    file = AnswerFile(path)
    list(writer.write(jobs(), file))
    assert len(file.rows) == len(PROMPTS) and file.done == straight.done
    greedy = [{row["id"]: row for row in f.rows if not row["temperature"]} for f in (file, straight)]
    assert greedy[0] == greedy[1] and greedy[0]


def test_samples_differ_and_temperatures_take_their_shares(writer, tmp_path):
    rows = list(writer.write(jobs({1.0: 1.0}, samples=3, rows=PROMPTS[:1]), AnswerFile(tmp_path / "answers.jsonl")))
    assert {row["id"] for row in rows} == {"a#0", "a#1", "a#2"}
    assert len({tuple(row["answer_ids"]) for row in rows}) > 1
    many = [{"id": str(i), "prompt": "p"} for i in range(1000)]
    mixed = jobs({0.0: 3.0, 0.7: 1.0}, rows=many)
    assert 700 < sum(job.temperature == 0 for job in mixed) < 800
    # More prompts change no temperature.
    assert [j.temperature for j in mixed[:10]] == [j.temperature for j in jobs({0.0: 3.0, 0.7: 1.0}, rows=many[:10])]


def test_prompts_without_room_are_left_out(writer, tmp_path):
    long = [{"id": "long", "prompt": "x" * 600}]
    rows = list(writer.write(jobs(rows=PROMPTS[:2] + long), AnswerFile(tmp_path / "answers.jsonl")))
    assert {row["id"] for row in rows} == {"a", "b"}
    with pytest.raises(ValueError, match="every prompt needs more than the target's 512 positions"):
        list(writer.write(jobs(rows=long), AnswerFile(tmp_path / "more.jsonl")))


def test_made_up_prompts_are_new_and_ended_and_resume(writer, tmp_path, monkeypatch):
    file = AnswerFile(tmp_path / "made.jsonl")
    rows = list(writer.synthesise(6, file))
    assert len(rows) == 6 == len({answers.normalised(row["prompt"]) for row in rows}) == len({r["id"] for r in rows})
    assert all(row["source"] == "self-synthesised" and row["prompt"] for row in rows)
    part = AnswerFile(tmp_path / "part.jsonl")
    one = writer.synthesise(6, part)
    next(one)
    one.close()
    list(writer.synthesise(6, AnswerFile(part.path)))
    assert part.path.read_bytes() == file.path.read_bytes()
    assert list(writer.synthesise(6, AnswerFile(file.path))) == []
    monkeypatch.setattr(LocalWriter, "_generate", lambda self, prompts, *_: [([70, 71], False) for _ in prompts])
    with pytest.raises(ValueError, match="ended none of the last 40 user turns"):
        list(writer.synthesise(7, AnswerFile(file.path)))


# files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_row_is_in_the_file_whole_or_not_at_all(tmp_path, monkeypatch, failure):
    file = AnswerFile(tmp_path / "answers.jsonl")
    file.append([{"id": "kept"}])
    before, write = file.path.read_bytes(), os.write

    def half(fd, data):
        if len(data) < 20:
            raise failure
        return write(fd, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(answers.os, "write", half)
        with pytest.raises(type(failure)) as raised:
            file.append([{"id": "lost", "answer": "x" * 50}])
    if isinstance(failure, OSError):
        assert "No space left on device; its 1 finished rows are kept" in str(raised.value)
    assert file.path.read_bytes() == before and file.done == {"kept"}
    file.append([{"id": "next"}])
    assert AnswerFile(file.path).done == {"kept", "next"}


def test_files_of_other_settings_and_broken_files_are_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    AnswerFile(path, {"target": "t", "mode": {}}).append([{"id": "a"}])
    assert AnswerFile(path, {"target": "t", "mode": {}}).done == {"a"}
    with pytest.raises(ValueError, match="written with target 't' .now 'u'."):
        AnswerFile(path, {"target": "u", "mode": {}})
    path.write_text('{"id": "a"}\nnonsense\n{"id": "b"}\n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        AnswerFile(path)


@pytest.mark.parametrize(
    "row",
    [
        {"id": "r"},
        {"id": "r", "prompt": " "},
        {"id": "r", "turns": []},
        {"id": "r", "messages": [{"role": "assistant", "content": "x"}]},
        {"id": "r", "messages": ["x"]},
        {"id": "r", "prompt": 3},
    ],
)
def test_prompts_of_another_form_are_named(row):
    with pytest.raises(ValueError, match="prompt 'r': expected"):
        ChatPrompt.from_row(row, 1, "file")


def test_prompt_files_and_datasets_folders_are_read(tmp_path):
    from datasets import Dataset

    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "x"}\n\n{"turns": ["y", "z"], "category": "c"}\n')
    first, second = answers.read_prompts(file)
    assert (first.id, first.source, first.later) == ("mine-1", "mine", [])
    assert (second.id, second.source, second.later, second.text) == ("mine-2", "c", ["z"], "y\nz")
    Dataset.from_list([{"prompt": "x", "id": "d"}]).save_to_disk(str(tmp_path / "set"))
    assert [p.id for p in answers.read_prompts(tmp_path / "set")] == ["d"]
    file.write_text('{"id": "d", "prompt": "x"}\n{"id": "d", "prompt": "y"}\n')
    with pytest.raises(ValueError, match="the id 'd' stands there twice"):
        answers.read_prompts(file)


# servers --------------------------------------------------------------------------------------------------------------


class StandIn(BaseHTTPRequestHandler):
    """Answers "re: <last message>"; refuses "bad"; fails the first request of each "flaky"; all of "down"."""

    seen: list[dict] = []
    failed: set[str] = set()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        self.seen.append({**body, "path": self.path, "key": self.headers["Authorization"]})
        if text == "bad":
            return self.reply(400, {"error": {"message": "too long"}})
        if text == "down" or (text == "flaky" and text not in self.failed):
            self.failed.add(text)
            return self.reply(500, {"error": {"message": "out of order"}})
        reason = "length" if text == "long" else "stop"
        choice = {"index": 0, "message": {"role": "assistant", "content": "re: " + text}, "finish_reason": reason}
        if body.get("return_token_ids"):
            choice["token_ids"] = [1, 2, 3]
        self.reply(200, {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})

    def reply(self, status, content):
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    StandIn.seen, StandIn.failed = [], set()
    with ThreadingHTTPServer(("127.0.0.1", 0), StandIn) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}/v1"
        httpd.shutdown()
        thread.join()


def test_a_server_answers_in_parallel_every_turn(server, tmp_path):
    rows = [*PROMPTS, {"id": "l", "prompt": "long"}, {"id": "f", "prompt": "flaky"}, {"id": "bad", "prompt": "bad"}]
    writer = ServerWriter(server, "m", concurrency=3, max_new_tokens=9, mode={"enable_thinking": False}, retries=1)
    file = AnswerFile(tmp_path / "answers.jsonl", writer.settings())
    list(writer.write(jobs(rows=rows), file))
    got = {row["id"]: row for row in answers.read_jsonl(file.path)}
    assert set(got) == {row["id"] for row in rows} - {"bad"}
    assert got["a"]["answer"] == "re: one" and got["a"]["finished"] and "answer_ids" not in got["a"]
    assert got["b"]["answers"] == ["re: first", "re: then"] and got["f"]["answer"] == "re: flaky"
    assert not got["l"]["finished"]
    asked = next(s for s in StandIn.seen if s["messages"][-1]["content"] == "then")
    assert [m["content"] for m in asked["messages"]] == ["first", "re: first", "then"]
    assert asked["path"] == "/v1/chat/completions" and asked["key"] == "Bearer from-the-environment"
    assert asked["max_tokens"] == 9 and asked["chat_template_kwargs"] == {"enable_thinking": False}
    assert {s["temperature"] for s in StandIn.seen} == {0.0, 0.8}
    # What is done is not asked again.
    before = len(StandIn.seen)
    list(writer.write(jobs(rows=rows[:-1]), AnswerFile(file.path, writer.settings())))
    assert len(StandIn.seen) == before


def test_a_server_may_give_the_tokens(server, tmp_path):
    writer = ServerWriter(server, "m", extra={"return_token_ids": True})
    (row,) = writer.write(jobs(rows=PROMPTS[:1]), AnswerFile(tmp_path / "answers.jsonl"))
    assert row["answer_ids"] == [1, 2, 3]


def test_a_server_that_fails_loses_nothing(server, tmp_path):
    file = AnswerFile(tmp_path / "answers.jsonl")
    writer = ServerWriter(server, "m", concurrency=1, retries=0)
    with pytest.raises(ConnectionError, match="out of order.*2 answers are kept"):
        list(writer.write(jobs(rows=[*PROMPTS[:2], {"id": "d", "prompt": "down"}, *PROMPTS[3:]]), file))
    assert AnswerFile(file.path).done == {"a", "b"}
    with pytest.raises(ConnectionError, match="Connection error"):
        list(ServerWriter("http://127.0.0.1:9/v1", "m", retries=0).write(jobs(), file))
