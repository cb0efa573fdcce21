"""From answers to a data folder that training reads, and from its rows to batches.

A data folder holds `train` and, where texts are held out, `held_out`, each as datasets' `save_to_disk` writes it, with
columns id, source, index (the row's own number), input_ids, loss_mask and document_ids (1, 2, ... along a packed row);
and `specdraft.json`, which says whose answers these are, how they were rendered, and how many tokens there are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .answers import ChatPrompt, Row, normalised, present, read_rows
from .conversations import ChatEncoder, Messages, Written

ABOUT = "specdraft.json"
TRAIN, HELD_OUT = "train", "held_out"

# Evaluation prompts count as known from this share of word sequences of this length on, of the shorter text's.
GRAM, OVERLAP = 8, 0.5


@dataclass
class Document:
    """A piece of a chat: int32 tokens, bool mask of those the target wrote, and the prompt that tells chats apart."""

    id: str
    source: str
    prompt: str
    ids: np.ndarray
    mask: np.ndarray


def prepare(
    rows: str | Path | Iterable[Row],
    tokenizer: Any,
    folder: str | Path,
    *,
    length: int = 2048,
    pack: bool = False,
    held_out: float = 0.02,
    dedupe: str | Path | None = None,
    mode: Mapping[str, Any] | None = None,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the data folder of these answers and return what its `specdraft.json` says.

    rows: a JSON lines file, a datasets folder, or objects: answers as `training.answers` writes them, or `messages`
        that end with an assistant's turn, of which all assistant turns are then learnt.
    length: tokens a row at most. Longer chats become windows of that many tokens. Each but the first begins with
        length // 4 tokens of the window before as context, not supervised again; windows without supervised tokens go.
    pack: put several chats into one row where they fit (they stay apart: see `document_ids`).
    held_out: share of prompts kept for evaluation, chosen by the prompt's hash, so all samples of one are on one side.
    dedupe: a file of evaluation prompts. Rows with the same words in their prompt, or half of the 8-word sequences of
        the shorter of the two, are dropped. Rows with the prompt and answer of another are dropped too.
    mode: the chat template's arguments. about: further facts for `specdraft.json`, such as target and revision.
    An interrupted or failed call leaves the folder without the new data, and without half of it. Raises ValueError for
    rows of another form, when nothing is left, and when nothing or everything in a chat would be supervised.
    """
    if length < 8 or not 0 <= held_out < 1:
        raise ValueError(f"expected length from 8 and held_out in [0, 1), got {length} and {held_out}")
    encoder = ChatEncoder(tokenizer, mode)
    known = None if dedupe is None else Evaluation(dedupe)
    dropped: Counter[str] = Counter()
    documents: dict[str, list[Document]] = {TRAIN: [], HELD_OUT: []}
    temperatures: Counter[str] = Counter()
    seen: set[bytes] = set()
    given = read_rows(rows) if isinstance(rows, (str, Path)) else rows
    for number, row in enumerate(given, 1):
        if not isinstance(row, Mapping):
            raise ValueError(f"row {number}: expected an object, got {row!r}; of a DatasetDict give one split")
        row = present(row)
        name = str(row.get("id", number))
        try:
            messages, written = conversation(row)
            prompt = "\n".join(m["content"] for m in messages if m["role"] == "user")
            reason = _unwanted(messages, written, prompt, known, seen)
            if reason is not None:
                dropped[reason] += 1
                continue
            samples = encoder.encode(messages, written)
        except ValueError as error:
            raise ValueError(f"row {name!r}: {error}") from error
        split = HELD_OUT if _share(prompt) < held_out else TRAIN
        temperatures["unknown" if row.get("temperature") is None else f"{row['temperature']:g}"] += 1
        for turn, sample in enumerate(samples):
            sample_id = name if len(samples) == 1 else f"{name}/{turn}"
            ids, mask = np.array(sample.ids, np.int32), np.array(sample.mask, bool)
            source = str(row.get("source") or row.get("category") or "")
            documents[split] += windows(Document(sample_id, source, prompt, ids, mask), length)
    if not documents[TRAIN]:
        raise ValueError(
            f"no row is left to train on ({', '.join(f'{n} {reason}' for reason, n in dropped.items()) or 'none given'}"
            f"{'; all are held out' if documents[HELD_OUT] else ''})"
        )
    splits = {name: packed(docs, length) if pack else [[d] for d in docs] for name, docs in documents.items() if docs}
    facts = {
        **(about or {}),
        **encoder.about(),
        "temperatures": dict(sorted(temperatures.items())),
        "length": length,
        "packed": pack,
        "dropped": dict(dropped),
        "splits": {name: _count(rows) for name, rows in splits.items()},
    }
    _save(splits, facts, Path(folder))
    return facts


def conversation(row: Row) -> tuple[Messages, dict[int, Written] | None]:
    """A row's chat, and which of its messages the target wrote (None: every assistant turn). ValueError if neither."""
    if "messages" in row and "answer" not in row:
        messages = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
        if not messages or messages[-1]["role"] != "assistant":
            raise ValueError("its messages do not end with an assistant's turn, and it has no answer")
        return messages, None
    asked = ChatPrompt.from_row(row, 0, "row")
    several = bool(asked.later)
    names = ("answers", "answer_ids", "finished") if several else ("answer", "answer_ids", "finished")
    texts, ids, finished = (row.get(name) for name in names)
    if not several:
        texts, ids, finished = [texts], [ids], [finished]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"it has no {names[0]}: give answers that the target wrote, or have them written")
    messages, written = list(asked.opening), {}
    for i, text in enumerate(texts):
        if i:
            messages.append({"role": "user", "content": asked.later[i - 1]})
        ended = True if finished is None or finished[i] is None else finished[i]
        written[len(messages)] = Written(None if ids is None else ids[i], ended)
        messages.append({"role": "assistant", "content": text})
    return messages, written


def windows(document: Document, length: int) -> Iterator[Document]:
    """A document in pieces of at most `length` tokens that hold supervised ones, each such token in exactly one."""
    if len(document.ids) <= length:
        yield document
        return
    context = length // 4
    for number, start in enumerate(range(0, len(document.ids) - context, length - context)):
        mask = document.mask[start : start + length].copy()
        if start:
            mask[:context] = False
        if mask.any():
            ids = document.ids[start : start + length]
            yield Document(f"{document.id}~{number}", document.source, document.prompt, ids, mask)


def packed(documents: Sequence[Document], length: int) -> list[list[Document]]:
    """Rows of at most `length` tokens: the longest documents first, each into the fullest row that still takes it."""
    rows: list[list[Document]] = []
    free: list[tuple[int, int]] = []  # (room, row), ascending
    for document in sorted(documents, key=lambda d: (-len(d.ids), d.id)):
        at = bisect_left(free, (len(document.ids), 0))
        if at == len(free):
            rows.append([document])
            insort(free, (length - len(document.ids), len(rows) - 1))
        else:
            room, row = free.pop(at)
            rows[row].append(document)
            insort(free, (room - len(document.ids), row))
    return rows


class Evaluation:
    """Prompts to be measured on, which training must not see. `knows(prompt)` finds the same and near ones."""

    def __init__(self, path: str | Path):
        self.words: set[str] = set()
        self.grams: dict[str, list[int]] = defaultdict(list)
        self.sizes: list[int] = []
        for number, row in enumerate(read_rows(path), 1):
            prompt = ChatPrompt.from_row(row, number, Path(path).stem)
            for text in (prompt.opening[-1]["content"], *prompt.later):
                self.words.add(normalised(text))
                grams = _grams(text)
                for gram in grams:
                    self.grams[gram].append(len(self.sizes))
                self.sizes.append(len(grams))

    def knows(self, prompt: str) -> bool:
        """Whether the prompt has the words of one of these, or half of the 8-word sequences of the shorter one."""
        if normalised(prompt) in self.words:
            return True
        grams = _grams(prompt)
        shared = Counter(i for gram in grams for i in self.grams.get(gram, ()))
        return any(n >= OVERLAP * min(len(grams), self.sizes[i]) for i, n in shared.items())


def load(folder: str | Path) -> tuple[Any, Any, dict[str, Any]]:
    """(training set, held-out set or None, what `specdraft.json` says) of a data folder. ValueError if it is none."""
    from datasets import load_from_disk

    folder = Path(folder)
    if not (folder / ABOUT).exists():
        raise ValueError(f"{folder} is no data folder: it has no {ABOUT}; `hf-specdraft data` makes one")
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    sets = load_from_disk(str(folder))
    if not isinstance(sets, Mapping):
        raise ValueError(f"{folder} is one split of a data folder; give the whole, {folder.absolute().parent}")
    return sets[TRAIN], sets.get(HELD_OUT), about


def collate(rows: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """Rows of a data set as the fields of a TrainingBatch, right-padded; and `index` [B] where the rows have it."""
    if not rows:
        raise ValueError("a batch needs at least one row")
    width = max(len(row["input_ids"]) for row in rows)
    shape = (len(rows), width)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    document_ids, position_ids = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    for b, row in enumerate(rows):
        n = len(row["input_ids"])
        document = torch.as_tensor(row["document_ids"], dtype=torch.long)
        input_ids[b, :n] = torch.as_tensor(row["input_ids"], dtype=torch.long)
        loss_mask[b, :n] = torch.as_tensor(row["loss_mask"], dtype=torch.bool)
        document_ids[b, :n] = document
        position_ids[b, :n] = torch.arange(n) - torch.searchsorted(document, document)
    batch = dict(input_ids=input_ids, document_ids=document_ids, position_ids=position_ids, loss_mask=loss_mask)
    if "index" in rows[0]:
        batch["index"] = torch.tensor([row["index"] for row in rows])
    return batch


def _unwanted(messages, written, prompt: str, known: Evaluation | None, seen: set[bytes]) -> str | None:
    """Why a chat is dropped, None if it is not."""
    turns = [m["content"] for i, m in enumerate(messages) if m["role"] == "assistant" and (not written or i in written)]
    if not all(turn.strip() for turn in turns) or any(w.ids == [] for w in (written or {}).values()):
        return "without an answer"
    if known is not None and known.knows(prompt):
        return "known from the evaluation"
    key = hashlib.sha256(json.dumps([normalised(prompt), turns]).encode()).digest()
    if key in seen:
        return "there twice"
    seen.add(key)
    return None


def _share(text: str) -> float:
    """A number in [0, 1) that hangs on the text's words alone."""
    return int.from_bytes(hashlib.sha256(normalised(text).encode()).digest()[:8], "big") / 2**64


def _grams(text: str) -> set[str]:
    words = normalised(text).split()
    return {" ".join(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)}


def _count(rows: Sequence[Sequence[Document]]) -> dict[str, int]:
    documents = [document for row in rows for document in row]
    return {
        "rows": len(rows),
        "documents": len(documents),
        "tokens": sum(len(d.ids) for d in documents),
        "supervised_tokens": int(sum(d.mask.sum() for d in documents)),
    }


def _save(splits: Mapping[str, Sequence[Sequence[Document]]], facts: Mapping[str, Any], folder: Path) -> None:
    from datasets import Dataset, DatasetDict, Features, List, Value

    features = Features(
        id=Value("string"),
        source=Value("string"),
        index=Value("int64"),
        input_ids=List(Value("int32")),
        loss_mask=List(Value("bool")),
        document_ids=List(Value("int32")),
    )
    sets = {
        name: Dataset.from_dict(
            {
                "id": ["+".join(d.id for d in row) for row in rows],
                "source": ["+".join(sorted({d.source for d in row})) for row in rows],
                "index": list(range(len(rows))),
                "input_ids": [np.concatenate([d.ids for d in row]) for row in rows],
                "loss_mask": [np.concatenate([d.mask for d in row]) for row in rows],
                "document_ids": [np.repeat(np.arange(1, len(row) + 1), [len(d.ids) for d in row]) for row in rows],
            },
            features=features,
        )
        for name, rows in splits.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        DatasetDict(sets).save_to_disk(str(partial))
        text = json.dumps(facts, indent=1) + "\n"
        for place in (partial, *(partial / name for name in sets)):
            (place / ABOUT).write_text(text, encoding="utf-8")
        # The list of splits goes first and comes last: without it the folder is refused rather than read by halves.
        (folder / "dataset_dict.json").unlink(missing_ok=True)
        for name in (TRAIN, HELD_OUT):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in (*sets, ABOUT, "dataset_dict.json"):
            (partial / name).replace(folder / name)
    except OSError as error:
        raise OSError(f"{folder}: {error.strerror or error}; no data was written, the answers are kept") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
