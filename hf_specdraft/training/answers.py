"""Answers that the target writes to prompts, here or on an OpenAI-compatible server, kept line by line as they finish.

A drafter must learn the target's own words, so it is trained on these. Rows of the JSON lines file: id, source, the
prompt as it was given (`prompt`, or `messages` that end with the user's turn), answer, answer_ids (without the
template's stop token; absent where a server gave text only), finished (the target ended the turn itself), temperature.
Prompts with several `turns` have lists: answers, answer_ids, finished, one entry a turn answered.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from .conversations import ChatEncoder, Messages, Written

logger = logging.get_logger(__name__)

Row = dict[str, Any]


class AnswerFile:
    """A JSON lines file that grows by whole rows: each `append` is on disk or not there at all.

    settings: what the rows were made with, kept beside the file. Opening removes a last line that was only half
    written, and raises ValueError when other settings made the rows, or when a line inside the file is not JSON.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any] | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = self._mended() if self.path.exists() else []
        if settings is not None:
            self._compare(json.loads(json.dumps(settings)))

    @property
    def done(self) -> set[str]:
        """Ids of the rows."""
        return {row["id"] for row in self.rows}

    def append(self, rows: Sequence[Row]) -> None:
        """Write rows through to the disk. OSError, with the file as it was before, when that fails."""
        data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(fd).st_size
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        except BaseException as error:
            os.ftruncate(fd, size)
            if isinstance(error, OSError):
                raise OSError(
                    f"{self.path}: {error.strerror or error}; its {len(self.rows)} finished rows are kept, and the "
                    "same call continues behind them once it can write again"
                ) from error
            raise
        finally:
            os.close(fd)
        self.rows += rows

    def _mended(self) -> list[Row]:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self.path, whole)
        return read_jsonl(self.path)

    def _compare(self, settings: Row) -> None:
        beside = self.path.with_suffix(".settings.json")
        if self.rows and beside.exists():
            before = json.loads(beside.read_text(encoding="utf-8"))
            other = sorted(k for k in before.keys() | settings.keys() if before.get(k) != settings.get(k))
            if other:
                was = ", ".join(f"{k} {before.get(k)!r} (now {settings.get(k)!r})" for k in other)
                raise ValueError(f"{self.path} was written with {was}; continue with the same or choose another folder")
        else:
            beside.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def read_jsonl(path: str | Path) -> list[Row]:
    """The objects of a JSON lines file. ValueError naming the line that is not one."""
    rows = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
            rows.append(row)
    return rows


@dataclass(frozen=True)
class ChatPrompt:
    """What the target is asked: an opening chat that ends with a user's turn, and further user turns.

    given: the prompt's own fields, which its answers' rows repeat.
    """

    id: str
    source: str
    opening: Messages
    later: list[str]
    given: Row

    @property
    def text(self) -> str:
        """What the user says in all turns."""
        return "\n".join([m["content"] for m in self.opening if m["role"] == "user"] + self.later)

    @classmethod
    def from_row(cls, row: Row, number: int, source: str) -> ChatPrompt:
        """From an object with `prompt`, `turns` or `messages`; id and source (or category) are optional.

        Raises ValueError for anything else, naming the row.
        """
        row = present(row)
        name = str(row.get("id", f"{source}-{number}"))
        source = str(row.get("source") or row.get("category") or source)
        try:
            if "messages" in row:
                messages = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
                # A data set's own answer to the last turn gives way to the target's.
                while messages and messages[-1]["role"] == "assistant":
                    messages.pop()
                turns, given = [m["content"] for m in messages], {"messages": messages}
                if not messages or messages[-1]["role"] != "user":
                    raise TypeError("no user turn to answer")
                opening, later = messages, []
            else:
                turns = list(row["turns"]) if "turns" in row else [row["prompt"]]
                opening, later = [{"role": "user", "content": turns[0]}], turns[1:]
                given = {"turns": turns} if later else {"prompt": turns[0]}
            if not all(isinstance(turn, str) and turn.strip() for turn in turns):
                raise TypeError("an empty turn")
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"prompt {name!r}: expected `prompt` (text), `turns` (texts) or `messages` (role, content) ({error!r})"
            ) from error
        return cls(name, source, opening, later, given)


def present(row: Mapping[str, Any]) -> Row:
    """A row's fields but those that datasets fills in with None because other rows have them."""
    return {key: value for key, value in row.items() if value is not None}


def read_prompts(path: str | Path) -> list[ChatPrompt]:
    """Prompts of a .jsonl file or a datasets folder. ValueError when there are none, or an id stands there twice."""
    prompts = [ChatPrompt.from_row(row, n, Path(path).stem) for n, row in enumerate(read_rows(path), 1)]
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"{path}: the id {prompt.id!r} stands there twice; answers are told apart by it")
        seen.add(prompt.id)
    return prompts


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a .jsonl file or of a folder that datasets' `save_to_disk` wrote. ValueError when there are none."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if path.is_dir():
        from datasets import load_from_disk

        rows = list(load_from_disk(str(path)))
    else:
        rows = read_jsonl(path)
    if not rows or not isinstance(rows[0], dict):
        raise ValueError(f"{path} holds no rows" if not rows else f"{path} holds several splits; name one of them")
    return rows


@dataclass
class Answer:
    """One turn of the target's: text, tokens (None where a server tells the text only), whether it ended it itself."""

    text: str
    ids: list[int] | None
    finished: bool


@dataclass
class Job:
    """One sample of answers to one prompt, at one temperature."""

    id: str
    prompt: ChatPrompt
    temperature: float
    answers: list[Answer] = field(default_factory=list)

    def messages(self) -> Messages:
        """The chat up to the user's turn that comes next."""
        chat = list(self.prompt.opening)
        for answer, turn in zip(self.answers, self.prompt.later):
            chat += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": turn}]
        return chat

    def written(self) -> dict[int, Written]:
        """The target's turns so far, by message number."""
        first = len(self.prompt.opening)
        return {first + 2 * i: Written(a.ids, a.finished) for i, a in enumerate(self.answers)}

    @property
    def over(self) -> bool:
        """Whether nothing is left to ask: no turn is, or the last answer was cut off or empty."""
        last = self.answers[-1] if self.answers else None
        return last is not None and (len(self.answers) > len(self.prompt.later) or not (last.finished and last.text))

    def row(self) -> Row:
        """The finished job as a line of the file."""
        texts, ids, finished = zip(*((a.text, a.ids, a.finished) for a in self.answers))
        if self.prompt.later:
            said = {"answers": list(texts), "answer_ids": list(ids), "finished": list(finished)}
        else:
            said = {"answer": texts[0], "answer_ids": ids[0], "finished": finished[0]}
        if None in ids:
            del said["answer_ids"]
        return {
            "id": self.id,
            "source": self.prompt.source,
            **self.prompt.given,
            **said,
            "temperature": self.temperature,
        }


def plan(prompts: Iterable[ChatPrompt], temperatures: Mapping[float, float], samples: int = 1) -> list[Job]:
    """The jobs: `samples` for each prompt. temperatures: temperature -> share; 0 is greedy.

    A job's temperature hangs on its id alone, so that a longer prompt file changes none. Raises ValueError for shares
    that are not positive and for temperatures below 0.
    """
    if not temperatures or min(temperatures) < 0 or min(temperatures.values()) <= 0 or samples < 1:
        raise ValueError(f"expected temperatures from 0 with positive shares and samples from 1: {dict(temperatures)}")
    edges = list(accumulate(temperatures.values()))
    jobs = []
    for prompt in prompts:
        for sample in range(samples):
            name = f"{prompt.id}#{sample}" if samples > 1 else prompt.id
            at = _hash(name) / 2**64 * edges[-1]
            chosen = next(t for t, edge in zip(temperatures, edges) if at < edge)
            jobs.append(Job(name, prompt, float(chosen)))
    if not jobs:
        raise ValueError("there are no prompts to answer")
    return jobs


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


# here -----------------------------------------------------------------------------------------------------------------


@dataclass
class LocalWriter:
    """The target, loaded here, writing batches of one temperature each, left-padded, longest prompts first.

    batch_size: rows a batch. max_new_tokens: tokens a turn. top_p: of the sampled answers. mode: the chat template's
    arguments. Batches and their seeds hang on the jobs alone, so that a resumed run writes what an uninterrupted one
    would. On CPUs with AMX a target in bfloat16 is several times faster than one in float32.
    """

    target: Any
    tokenizer: Any
    batch_size: int = 16
    max_new_tokens: int = 512
    top_p: float = 1.0
    mode: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self):
        self.encoder = ChatEncoder(self.tokenizer, self.mode)
        config = self.target.generation_config.eos_token_id
        ends = [] if config is None else [config] if isinstance(config, int) else list(config)
        self.ends = sorted({*ends, *([] if self.encoder.stop is None else [self.encoder.stop])})
        self.room = getattr(self.target.config.get_text_config(), "max_position_embeddings", None) or 2**31

    def settings(self) -> Row:
        """What makes the answers what they are, for the file's settings."""
        return {"max_new_tokens": self.max_new_tokens, "top_p": self.top_p, "seed": self.seed, **self.encoder.about()}

    def write(self, jobs: Sequence[Job], file: AnswerFile) -> Iterator[Row]:
        """Answer the jobs that the file lacks; rows come when they are on disk, a batch at a time.

        Prompts that leave no room for an answer are left out, with a warning. ValueError when that is all of them.
        """
        sized = sorted((job.temperature, -len(self._prompt(job)), job.id, job) for job in jobs)
        fitting = [job for _, length, _, job in sized if self._fits(-length)]
        if len(fitting) < len(sized):
            logger.warning("%d prompts are too long for the target and left out", len(sized) - len(fitting))
        if not fitting:
            raise ValueError(f"every prompt needs more than the target's {self.room} positions with its answer")
        done = file.done
        for _, group in groupby(fitting, key=lambda job: job.temperature):
            group = list(group)
            for start in range(0, len(group), self.batch_size):
                batch = group[start : start + self.batch_size]
                missing = [job for job in batch if job.id not in done]
                if missing:
                    self._answer(missing, seed=_hash(f"{self.seed} {batch[0].id}"))
                    rows = [job.row() for job in missing]
                    file.append(rows)
                    yield from rows

    def synthesise(self, count: int, file: AnswerFile, top_p: float = 0.95) -> Iterator[Row]:
        """Prompts that the target makes up: it continues the user's turn that its template begins, at temperature 1.

        Kept are those that it ended itself and that are not there yet (case and punctuation aside), until the file has
        `count`; rows (id, source, prompt) come when they are on disk. Raises ValueError when ten batches in a row bring
        nothing new: the target does not know how a user's turn ends.
        """
        prefix = self.encoder.user_prefix()
        seen = {normalised(row["prompt"]) for row in file.rows}
        # A round is written at once, so the next one is known from the rows there are.
        turn = 1 + max((int(row["id"].split("-")[1]) for row in file.rows), default=-1)
        idle = 0
        while len(file.rows) < count:
            rows = []
            said = self._generate([prefix] * self.batch_size, 1.0, top_p, _hash(f"{self.seed} prompts {turn}"))
            for i, (ids, finished) in enumerate(said):
                text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
                if finished and normalised(text) and normalised(text) not in seen:
                    seen.add(normalised(text))
                    rows.append({"id": f"self-{turn}-{i}", "source": "self-synthesised", "prompt": text})
            rows = rows[: count - len(file.rows)]
            turn, idle = turn + 1, 0 if rows else idle + 1
            if idle == 10:
                raise ValueError(
                    f"the target ended none of the last {10 * self.batch_size} user turns with something new; "
                    f"{len(file.rows)} prompts are kept in {file.path}: ask for fewer, or give prompts"
                )
            if rows:
                file.append(rows)
                yield from rows

    def _prompt(self, job: Job) -> list[int]:
        return self.encoder.prompt(job.messages(), job.written())

    def _fits(self, length: int) -> bool:
        return length + self.max_new_tokens <= self.room

    def _answer(self, jobs: Sequence[Job], seed: int) -> None:
        """Every turn of these jobs, as far as they go."""
        while True:
            asked = [(job, self._prompt(job)) for job in jobs if not job.over]
            asked = [(job, prompt) for job, prompt in asked if self._fits(len(prompt))]
            if not asked:
                return
            said = self._generate([prompt for _, prompt in asked], asked[0][0].temperature, self.top_p, seed)
            for (job, _), (ids, finished) in zip(asked, said):
                job.answers.append(Answer(self.tokenizer.decode(ids, skip_special_tokens=True), ids, finished))
            seed += 1

    def _generate(
        self, prompts: Sequence[list[int]], temperature: float, top_p: float, seed: int
    ) -> list[tuple[list[int], bool]]:
        """(new tokens, ended) for each prompt. Of end tokens only those that are not the template's own stay."""
        width = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id
        pad = pad if pad is not None else (self.ends or [0])[0]
        rows = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.target.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.target.device)
        law = dict(do_sample=False, temperature=None, top_p=None, top_k=None)
        if temperature:
            law = dict(do_sample=True, temperature=temperature, top_p=top_p, top_k=0)
        with torch.random.fork_rng(devices=[rows.device] if rows.is_cuda else []):
            torch.manual_seed(seed % 2**63)
            out = self.target.generate(
                input_ids=rows,
                attention_mask=mask,
                max_new_tokens=self.max_new_tokens,
                pad_token_id=pad,
                eos_token_id=self.ends or None,
                **law,
            )
        return [self._cut(row) for row in out[:, width:].tolist()]

    def _cut(self, ids: list[int]) -> tuple[list[int], bool]:
        end = next((i for i, token in enumerate(ids) if token in self.ends), None)
        if end is None:
            return ids, False
        return ids[: end + (ids[end] != self.encoder.stop)], True


def normalised(text: str) -> str:
    """The words of a text, without case and punctuation."""
    return " ".join(re.findall(r"\w+", text.lower()))


# on a server ----------------------------------------------------------------------------------------------------------


@dataclass
class ServerWriter:
    """The target behind an OpenAI-compatible server, asked in parallel.

    url: its base, such as http://localhost:8000/v1. model: the name it has there. api_key: by default the variable
    OPENAI_API_KEY, or none. concurrency: requests at a time. retries: of each, by the client. extra: further fields of
    the request's body, such as {"return_token_ids": True} on vLLM, which then gives the tokens as well as the text.
    """

    url: str
    model: str
    api_key: str | None = None
    concurrency: int = 32
    max_new_tokens: int = 512
    top_p: float = 1.0
    mode: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    retries: int = 5
    extra: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> Row:
        """What makes the answers what they are, for the file's settings."""
        kept = ("model", "max_new_tokens", "top_p", "seed", "mode", "extra")
        return {name: dict(v) if isinstance(v := getattr(self, name), Mapping) else v for name in kept}

    def write(self, jobs: Sequence[Job], file: AnswerFile) -> Iterator[Row]:
        """Answer the jobs that the file lacks; rows come when they are on disk, as they finish.

        Prompts that the server refuses are left out, with a warning. ConnectionError when it cannot be asked at all.
        """
        import openai

        # Threads rather than asyncio: a notebook has an event loop of its own running already.
        client = openai.OpenAI(
            base_url=self.url,
            api_key=self.api_key or os.environ.get("OPENAI_API_KEY") or "none",
            max_retries=self.retries,
        )
        done = file.done
        waiting = iter([job for job in jobs if job.id not in done])
        pool = ThreadPoolExecutor(self.concurrency)
        running = {pool.submit(self._answer, client, job) for job in islice(waiting, self.concurrency)}
        try:
            while running:
                ready, running = wait(running, return_when=FIRST_COMPLETED)
                running |= {pool.submit(self._answer, client, job) for job in islice(waiting, len(ready))}
                answered = [future.result() for future in ready if future.exception() is None]
                rows = [job.row() for job in answered if job.answers]
                if rows:
                    file.append(rows)
                    yield from rows
                for future in ready:
                    future.result()
        except openai.APIError as error:
            raise ConnectionError(
                f"{self.url}: {error}; {len(file.rows)} answers are kept in {file.path}, the same call continues"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            client.close()

    def _answer(self, client: Any, job: Job) -> Job:
        import openai

        body = {**({"chat_template_kwargs": dict(self.mode)} if self.mode else {}), **self.extra}
        while not job.over:
            try:
                reply = client.chat.completions.create(
                    model=self.model,
                    messages=job.messages(),
                    temperature=job.temperature,
                    top_p=self.top_p if job.temperature else 1.0,
                    max_tokens=self.max_new_tokens,
                    seed=(self.seed + _hash(job.id)) % 2**31,
                    extra_body=body or None,
                )
            except openai.BadRequestError as error:
                logger.warning("the server refuses prompt %s: %s", job.id, error)
                break
            choice = reply.choices[0]
            ids, finished = getattr(choice, "token_ids", None), choice.finish_reason == "stop"
            job.answers.append(Answer(choice.message.content or "", ids, finished))
        return job
