"""The rows of one call: their tokens, when each must stop, what is streamed, and what is recorded for the output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)


class Stops:
    """The request's stopping criteria, asked about every committed token with that token's own prefix.

    Length and end tokens are compared on the host; the clock is read once a round; any other criterion is called as
    plain generate would call it.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int):
        self.batch = batch
        self.max_length = min((c.max_length for c in criteria if type(c) is MaxLengthCriteria), default=None)
        self.end_ids = {int(i) for c in criteria if type(c) is EosTokenCriteria for i in c.eos_token_id.view(-1)}
        self.clocks = [c for c in criteria if type(c) is MaxTimeCriteria]
        known = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)
        self.others = [c for c in criteria if type(c) not in known]
        # Plain generate pads finished rows only when a criterion knows end tokens; otherwise every row runs on until
        # the last one stops.
        self.pads = any(hasattr(c, "eos_token_id") for c in criteria)

    def out_of_time(self, ids: Tensor) -> bool:
        return any(bool(clock(ids[:1], None)[0]) for clock in self.clocks)

    def __call__(self, row: int, token: int, length: int, prefix: Callable[[], Tensor], scores: Callable) -> bool:
        """Whether row `row` ends with `token`, its `length`-th id. `prefix()` gives the ids [length]."""
        return self.plainly(token, length) or any(
            self._ask(criterion, row, prefix(), scores) for criterion in self.others
        )

    def plainly(self, token: int, length: int) -> bool:
        """As the call, by length and end tokens alone."""
        return token in self.end_ids or self.max_length is not None and length >= self.max_length

    def _ask(self, criterion: Callable, row: int, ids: Tensor, scores: Callable) -> bool:
        # A user's criterion may look up its row by number: show it the row in its place.
        one = self.batch == 1 or type(criterion) is StopStringCriteria
        answer = criterion(ids[None] if one else ids.expand(self.batch, -1), scores())
        # Plain generate broadcasts it: one answer may stand for all rows.
        return bool(torch.as_tensor(answer).reshape(-1).expand(self.batch)[row])


class Rows:
    """Tokens of every row of the request, on the host and, when a processor or criterion wants them, as a tensor."""

    def __init__(self, input_ids: Tensor, criteria: StoppingCriteriaList, pad_token_id: int | None, streamer=None):
        self.batch, self.prompt_length = input_ids.shape
        self.stops = Stops(criteria, self.batch)
        self.pad_token_id = 0 if pad_token_id is None else pad_token_id
        self.streamer = streamer
        self.prompt = input_ids
        self.new: list[list[int]] = [[] for _ in range(self.batch)]
        self.done = [False] * self.batch
        self.records: list[list[dict]] = [[] for _ in range(self.batch)]
        # The last new token that can still be returned.
        self._last = 2**31 if self.stops.max_length is None else self.stops.max_length - self.prompt_length
        # Whether a row ends where it stops; otherwise all run on until the last one stops.
        self._stops_alone = self.stops.pads or self.batch == 1
        self._stopped_at: list[int | None] = [None] * self.batch
        self._going = self.batch
        self._ids = input_ids
        self._written = [0] * self.batch
        self._streamed = 0
        self._answers: dict[tuple[int, int], bool] = {}

    @property
    def all_done(self) -> bool:
        return all(self.done)

    def length(self, row: int) -> int:
        """Ids of the row as plain generate holds it: prompt with padding, and new tokens."""
        return self.prompt_length + len(self.new[row])

    def remaining(self, row: int) -> int:
        """New tokens the row may still get, a large number when nothing limits it."""
        return max(0, self._last - len(self.new[row]))

    def prefix(self, row: int, ahead: list[int] = ()) -> Tensor:
        """[l] ids of the row, followed by `ahead`."""
        new = self.new[row] + list(ahead)
        need = self.prompt_length + len(new)
        if need > self._ids.shape[1]:
            grown = self._ids.new_full((self.batch, 2 * need), self.pad_token_id)
            grown[:, : self._ids.shape[1]] = self._ids
            self._ids = grown
        # What `ahead` wrote is provisional: only committed tokens count as written.
        fresh = new[self._written[row] :]
        if fresh:
            at = self.prompt_length + self._written[row]
            self._ids[row, at : at + len(fresh)] = torch.tensor(fresh, device=self._ids.device)
            self._written[row] = len(self.new[row])
        return self._ids[row, :need]

    def ends(self, row: int, ahead: list[int], scores: Callable[[], tuple | None]) -> bool:
        """Whether the row would be over at the last of `ahead`: it does not run on until other rows stop."""
        return self._stops_alone and self._asked(row, ahead, scores)

    def _asked(self, row: int, ahead: list[int], scores: Callable[[], tuple | None]) -> bool:
        """Whether a criterion stops the row at the last of `ahead`. Each is asked once about every prefix."""
        count = len(self.new[row]) + len(ahead)
        if not self.stops.others:
            return self.stops.plainly(ahead[-1], self.prompt_length + count)
        if (row, count) not in self._answers:
            self._answers[row, count] = self.stops(
                row, ahead[-1], self.prompt_length + count, lambda: self.prefix(row, ahead), scores
            )
        return self._answers[row, count]

    def commit(self, row: int, tokens: list[int]) -> list[int]:
        """Append `tokens` up to and including the one the row stops at; returns those appended."""
        taken = []
        for token in tokens:
            count = len(self.new[row]) + 1
            stop = self._stopped_at[row] is None and self._asked(row, [token], partial(self.scores, row, count))
            self.new[row].append(token)
            taken.append(token)
            if stop:
                self._stopped_at[row] = count
                self._going -= 1
                if not self._stops_alone and not self._going:
                    self._cut(max(self._stopped_at))
            if self.remaining(row) == 0 or stop and self._stops_alone:
                self.done[row] = True
                break
        self._answers.clear()
        return taken

    def _cut(self, last: int) -> None:
        """Return no more than `last` new tokens: forget what rows and records hold beyond, end rows that have them."""
        self._last = last
        for part in (*self.new, *self.records):
            del part[last:]
        self.done = [len(new) >= last for new in self.new]

    def check_clock(self) -> None:
        """End every row when the request's time is up; called once a round."""
        if self.stops.clocks and self.stops.out_of_time(self.prompt):
            if not self.stops.pads:
                self._cut(min(map(len, self.new)))
            self.done = [True] * self.batch

    def stream(self) -> None:
        """Hand on single ids, in step for all rows: a step goes out when every row has it or has ended. Rows that have
        stopped and run on do not make a step certain; a later stop or a row that has not stopped does."""
        if self.streamer is None:
            return
        certain = min(self._last, max(stop or len(new) for stop, new in zip(self._stopped_at, self.new)))
        complete = min((len(new) for new, done in zip(self.new, self.done) if not done), default=certain)
        while self._streamed < min(certain, complete):
            step = [new[self._streamed] if self._streamed < len(new) else self.pad_token_id for new in self.new]
            self.streamer.put(torch.tensor(step))
            self._streamed += 1

    def sequences(self) -> Tensor:
        """[B, l] what generate returns: prompts and new tokens, padded on the right."""
        width = max(len(new) for new in self.new)
        new = torch.tensor([n + [self.pad_token_id] * (width - len(n)) for n in self.new], dtype=torch.long)
        return torch.cat([self.prompt, new.to(self.prompt.device)], dim=-1)

    def scores(self, row: int, count: int, ahead: list[Tensor] = ()) -> tuple | None:
        """The recorded scores of the row's first `count` new tokens and `ahead`, as a criterion sees them, or None."""
        recorded = [record["scores"] for record in self.records[row][:count] if "scores" in record]
        return tuple(s.expand(self.batch, -1) for s in (*recorded, *ahead)) or None
