"""Suffix matching and continuation trees over plain token arrays; no model, no tensors.

The counts are those of SuffixDecoding's suffix trees (2411.04975): how often a text goes on with a token after the last
m tokens of the context. A tree keeps them for every substring ever seen; here they are read off the occurrences of the
current context only, so a text costs nothing to build and one pass over it per draft.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

# Stands before every text and between texts of a pool; no token equals it, so that no match or copy crosses it.
SEPARATOR = -1
# From this match length on, occurrences beyond the limit are dropped: the rest of a copy is decided by then.
_DECIDED = 8
# So many tokens must agree before one that differs, for a copy to be followed past the difference.
_ALIGNED = 3


class Text:
    """Token ids that grow at the end; `ids` is an int32 view with a leading separator."""

    def __init__(self, tokens: Sequence[int] | np.ndarray = ()):
        self._ids = np.full(len(tokens) + 16, SEPARATOR, dtype=np.int32)
        self._size = 1
        self.extend(tokens)

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        end = self._size + len(tokens)
        if end > len(self._ids):
            self._ids = np.concatenate([self.ids, np.empty(end, dtype=np.int32)])
        self._ids[self._size : end] = tokens
        self._size = end

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: self._size]


def occurrences(ids: np.ndarray, context: np.ndarray, longest: int, limit: int) -> tuple[np.ndarray, ...]:
    """Where the last tokens of `context` occur in `ids`.

    Returns (positions, lengths, agreeing), each [O] in text order: the index after the occurrence (len(ids) for one
    that ends the text); how many tokens match, 1 to W = min(longest, len(context)); how many of the last W agree, with
    those beyond the first difference. Exact while the last token occurs at most `limit` times; beyond that the longest
    matches are kept, then the most recent, `limit` to 2 * `limit` of them.
    """
    longest = min(longest, len(context))
    if longest < 1:
        return (np.empty(0, dtype=np.int64),) * 3
    backwards = context[::-1][:longest]
    found = np.flatnonzero(ids == backwards[0]) + 1
    for length in range(1, min(longest, _DECIDED)):
        if len(found) <= limit:
            break
        longer = found[ids[np.maximum(found - 1 - length, 0)] == backwards[length]]
        if len(longer) < limit:
            found = np.union1d(longer, found[-limit:])
            break
        found = longer
    found = found[-2 * limit :]
    window = np.maximum(found[:, None] - np.arange(1, longest + 1), 0)
    agree = ids[window] == backwards
    lengths = np.where(agree.all(axis=1), longest, agree.argmin(axis=1))
    return found, lengths, agree.sum(axis=1)


def continuations(
    ids: np.ndarray,
    context: np.ndarray,
    depth: int,
    longest: int,
    limit: int,
    periodic: bool = False,
    edited: bool = False,
) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """What followed the occurrences of the last tokens of `context` in `ids`: up to `depth` tokens each, cut at a
    separator and at the end of `ids`, with (length, agreeing) of the occurrences it followed; the latest comes first.

    periodic: a copy that reaches the end of `ids` goes on into itself, as a loop would.
    edited: also what followed where only the very last token differs (length 0).
    """
    positions, lengths, agreeing = occurrences(ids, context, longest, limit)
    if edited:
        at, before, alike = occurrences(ids[:-1], context[:-1], longest, limit)
        differs = (before >= _ALIGNED) & (ids[at] != context[-1:]) & (ids[at] != SEPARATOR)
        positions = np.concatenate([positions, at[differs] + 1])
        lengths = np.concatenate([lengths, np.zeros(differs.sum(), dtype=lengths.dtype)])
        agreeing = np.concatenate([agreeing, alike[differs]])
    order = np.argsort(-positions)
    positions, pairs = positions[order], np.stack([lengths, agreeing], axis=1)[order]
    ahead = np.arange(depth)
    if periodic:
        ahead = ahead % np.maximum(len(ids) - positions, 1)[:, None]
    steps = positions[:, None] + ahead
    tokens = np.where(steps < len(ids), ids[np.minimum(steps, len(ids) - 1)], SEPARATOR)
    found: dict[tuple[int, ...], list[int]] = {}
    whole = (tokens != SEPARATOR).all(axis=1)
    for path, complete, pair in zip(tokens.tolist(), whole.tolist(), pairs.tolist()):
        if not complete:
            path = path[: path.index(SEPARATOR)]
        found.setdefault(tuple(path), []).append(tuple(pair))
    return found


class Growth(NamedTuple):
    """A tree of continuations: tokens, index of each one's parent (-1 = the context's last token), probabilities."""

    tokens: list[int]
    parents: list[int]
    probs: list[float]
    match: int = 0

    @property
    def score(self) -> float:
        """The expected number of accepted tokens, if the probabilities are right."""
        return sum(self.probs)


NOTHING = Growth([], [], [])


def grow(
    paths: Sequence[Sequence[int]],
    weights: list[float],
    matches: list[int],
    nodes: int,
    tree: bool = False,
    min_prob: float = 0.0,
    escape: float = 0.0,
    prior: Iterable[tuple[int, float]] = (),
) -> Growth:
    """The `nodes` most probable continuations, as `paths` vote for them with their `weights`.

    A child has its parent's probability times the share of the parent's weight that goes through it (paths that end at
    the parent keep their share), times M / (M + escape) where M is the length of the longest match there: `matches` at
    the root, one more with every token. `prior` gives (token, probability) for what is left at the root. Nodes come
    most probable first, hence parents before children. Without `tree` only the best child of each node is followed:
    a chain. Among equals the one with the earlier path in `paths` comes first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probs: list[float] = []
    queue: list[tuple[float, int, int, int, int, list[int]]] = []

    def push(parent: int, depth: int, prob: float, voters: list[int]) -> None:
        mass: dict[int, float] = {}
        through: dict[int, list[int]] = {}
        total, longest = 0.0, 0
        for voter in voters:
            total += weights[voter]
            longest = max(longest, matches[voter] + depth)
            path = paths[voter]
            if depth < len(path):
                token = path[depth]
                mass[token] = mass.get(token, 0.0) + weights[voter]
                through.setdefault(token, []).append(voter)
        trust = longest / (longest + escape) if voters else 0.0
        mass = {token: trust * weight / total for token, weight in mass.items()}
        if parent < 0:
            for token, share in prior:
                mass[token] = mass.get(token, 0.0) + (1 - trust) * share
        children = [
            (-prob * m, depth, through.get(t, (len(paths),))[0], parent, t, through.get(t, [])) for t, m in mass.items()
        ]
        for child in children if tree else sorted(children)[:1]:
            if -child[0] >= min_prob:
                heapq.heappush(queue, child)

    push(-1, 0, 1.0, list(range(len(paths))))
    while queue and len(tokens) < nodes:
        negative, depth, _, parent, token, voters = heapq.heappop(queue)
        tokens.append(token)
        parents.append(parent)
        probs.append(-negative)
        if voters:
            push(len(tokens) - 1, depth + 1, -negative, voters)
    return Growth(tokens, parents, probs)


def blend(
    texts: Sequence[np.ndarray],
    context: np.ndarray,
    nodes: int,
    depth: int,
    tree: bool = False,
    min_prob: float = 0.0,
    longest: int = 32,
    limit: int = 64,
    escape: float = 1.5,
    recent: int = 256,
) -> Growth:
    """Every occurrence of the last token of `context` in `texts` votes, with weight 2 ** (match length + a quarter for
    each token that agrees beyond the first difference).

    texts[0] is the row's own text, which ends with `context`. Differs from SuffixDecoding, which scores each match
    length by itself: one tree holds the continuations of long and short matches in the order of their probabilities;
    the text's own end does not vote; a copy that reaches the end repeats itself; a copy in which one token was replaced
    goes on behind it; and the most frequent of the last `recent` tokens (0: none) compete for the first place.
    """
    paths, weights, matches = [], [], []
    for ids in texts:
        own = ids is texts[0]
        for path, pairs in continuations(ids, context, depth, longest, limit, periodic=own, edited=True).items():
            if path:
                paths.append(path)
                weights.append(sum(2.0 ** (length + (agreeing - length) / 4) for length, agreeing in pairs))
                matches.append(max(1, *(length for length, _ in pairs)))
    window = context[-recent:].tolist() if recent else []
    prior = [(token, count / len(window)) for token, count in Counter(window).most_common(nodes)]
    return grow(paths, weights, matches, nodes, tree, min_prob, escape, prior)


def suffix(
    texts: Sequence[np.ndarray],
    context: np.ndarray,
    nodes: int,
    depth: int,
    tree: bool = False,
    min_prob: float = 0.1,
    longest: int = 64,
    limit: int = 1 << 30,
    factor: float = 1.0,
    offset: float = 0.0,
) -> Growth:
    """SuffixDecoding (2411.04975) as published: for every match length m a draft of up to `factor` * m + `offset`
    tokens, whose probabilities are plain occurrence ratios. The draft with the highest score wins, of equal ones the
    longest match, of equal texts the earlier.

    context: the row's last tokens, without separator.
    longest: the depth of the paper's trees; m is below it, and m plus the draft's depth at most it.
    """
    context = context[-longest:]
    best = NOTHING
    for number, ids in enumerate(texts):
        mine = NOTHING
        followed = continuations(ids, context, depth, len(context) - 1, limit)
        distinct = sorted({length for pairs in followed.values() for length, _ in pairs})
        for shorter, match in pairwise([0, *distinct]):
            counts = {path: sum(length >= match for length, _ in pairs) for path, pairs in followed.items()}
            paths = [path for path, times in counts.items() if times]
            weights = [float(counts[path]) for path in paths]
            # The matches in between have the same occurrences: only the longest matters, unless it leaves too little
            # of the tree's depth to the draft.
            for m in range(max(shorter + 1, min(match, longest - depth)), match + 1):
                budget = min(nodes, max(0, int(factor * m + offset + 1e-6)))
                cut = [path[: longest - m] for path in paths]
                found = grow(cut, weights, [m] * len(cut), budget, tree, min_prob)._replace(match=m)
                if found.score >= mine.score:
                    mine = found
        if number == 0 or mine.score > best.score:
            best = mine
    return best
