"""The loop: prefill, then rounds of propose, budget, score, verify, commit, observe. It knows no method by name."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from . import policies, trees
from .draft import Commit, Context, Draft, Partial, Verdict
from .drafters.base import Drafter, Session, TargetView
from .policies import FixedLength, PaysOff, Policy, Settings, Situation, costs_of, nominal_costs
from .recording import Recorder
from .rows import Rows
from .sampling import Scorer
from .speculation import Clock, Speculation
from .target import TargetPass, run_device
from .verifier import Verifier

# By cache handed back, the session that goes on when it comes in again and the rows' ids. Beside the caches, not on
# them: a copied or saved cache must not bring along the drafter and the target's embedding.
_SESSIONS: weakref.WeakKeyDictionary[Cache, tuple[Session, list[list[int]]]] = weakref.WeakKeyDictionary()


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What generate returns with `return_dict_in_generate=True`, and the call's statistics."""

    speculation: Speculation | None = None


def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter,
    streamer=None,
    synced_gpus: bool = False,
    **model_kwargs,
) -> SpeculativeOutput | Tensor:
    """Generate with `drafter`, in the law of plain generate. Arguments as transformers prepares them for a decoding
    method; called by the doorway (integration.py)."""
    call = _Call(model, input_ids, logits_processor, stopping_criteria, generation_config, drafter, model_kwargs)
    call.rows.streamer = streamer
    try:
        with torch.no_grad():
            call.prefill(input_ids, synced_gpus)
            with model._optimize_model_for_decode():
                while model._has_unfinished_sequences(call.rows.all_done, synced_gpus, device=input_ids.device):
                    call.round()
            return call.finish()
    finally:
        call.target.release()


class _Call:
    """One call's parts. `active` lists the request's rows still in the pass, in the pass's order."""

    def __init__(self, model, input_ids, processors, criteria, config, drafter, model_kwargs):
        self.model, self.config, self.drafter = model, config, drafter
        batch = input_ids.shape[0]
        self.settings = Settings.of(config)
        self.length = self.settings.length or drafter.config.num_assistant_tokens
        self.view = TargetView(model)
        drafter.check(self.view)
        self.scorer = Scorer(processors, batch, bool(config.do_sample))
        pad = config._pad_token_tensor
        self.rows = Rows(input_ids, criteria, None if pad is None else int(pad))
        self.target = TargetPass(model, config, model_kwargs, drafter.feature_layers)
        self.recorder = Recorder(config, self.rows, self.target, self.scorer)
        self.verifier = Verifier(self.scorer, self.rows, self.recorder, drafter.config)
        self.device = run_device(model, input_ids)
        self.clock = Clock(self.device)
        self.active = list(range(batch))
        self.stats = Speculation([0] * batch, [0] * batch)
        self.passes: list[list[int]] = [[] for _ in range(batch)]  # tokens that each pass committed, by row

    # ---- the steps ----

    def prefill(self, input_ids: Tensor, synced: bool) -> None:
        """The prompt through the target, its first token, and the drafter's session."""
        cache = self.target.kwargs.get("cache")
        self.handed_back = self.config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
        past = 0 if cache is None else int(cache.get_seq_length())
        with self.clock("target"):
            nodes = self.drafter.config.tree_nodes
            outputs = self.target.prefill(input_ids, 1 + max(self.length, nodes), trees=nodes > 0)
        self.start, self.prompt_lengths = list(self.target.rows.start), self.target.rows.lengths
        self.context_columns = self.target.rows.columns
        self.policy = self._policy(synced)
        self.threshold = policies.threshold_of(self.settings, self.drafter)
        self.session, known = _resume_or_start(cache, past, self.drafter, self.view, self._prompts(input_ids))
        empty = Draft.empty(len(self.active), self.device)
        logits = outputs.logits[:, -1:]
        verdict = self.verifier(empty, logits, self.active)
        self.recorder.prefill(outputs)
        features = self.target.prompt_features(self.drafter.device)
        committed = self._commit_tokens(empty, verdict, logits, None)
        tokens = [prompt[seen:] + new for prompt, seen, new in zip(self._prompts(input_ids), known, committed)]
        with self.clock("draft"):
            self.session.observe(Commit(tokens, features))
        self._end_round()

    def round(self) -> None:
        """One round; every call makes exactly one target pass, so that synchronised ranks stay in step."""
        before = self.clock.snapshot() if self._measures else {}
        draft, offered = self._propose()
        with self.clock("target"):
            outputs = self.target.score(self.anchor, draft)
        logits = outputs.logits[:, -1 - draft.shape[1] :]
        with self.clock("verify"):
            verdict = self.verifier(draft, logits, self.active)
        with self.clock("commit"):
            positions = self.target.rows.lengths
            committed = self._commit_tokens(draft, verdict, logits, outputs)
            features = self.target.path_features(outputs, self.kept, positions, self.drafter.device)
            rejected = None
            if self.drafter.wants_rejected and draft.is_chain and draft.shape[1]:
                nodes = draft.valid.sum(1).tolist()
                rejected = self.target.rejected_features(outputs, self.kept, nodes, positions, self.drafter.device)
            leaving = self._rows_to_keep()
            self.target.commit(1 + draft.shape[1], self.kept, [len(c) for c in committed], leaving)
        with self.clock("draft"):
            self.session.observe(Commit(committed, features, rejected))
            if leaving is not None:
                self.session.keep(leaving)
        self.policy.observe(self.active, offered, committed)
        if leaving is not None:
            self.active = [self.active[b] for b in leaving]
        self._end_round()
        if before and not self.rows.all_done and not draft.free and (draft.shape[1] or not self.drafter.is_free):
            self._measure(draft, before)

    def finish(self) -> SpeculativeOutput | Tensor:
        """What plain generate would return, with the cache as it would have left it."""
        sequences = self.rows.sequences()
        if self.rows.streamer is not None:
            self.rows.streamer.end()
        self.stats.settle([len(new) for new in self.rows.new], self.passes)
        if self.handed_back:
            longest = max(self.stats.tokens)
            columns = self.context_columns + longest - 1
            heard = [n + t - 1 for n, t in zip(self.prompt_lengths, self.stats.tokens)] == self.target.rows.lengths
            # Rows that ended before the longest one did: plain generate went on to feed their last token.
            unfed = [tokens < longest for tokens in self.stats.tokens]
            last = torch.tensor([new[-1] for new in self.rows.new], device=self.device)
            features = self.target.hand_back(self.start, columns, unfed, last, self.drafter.device)
            self.session.observe(Commit([[] for _ in unfed], features))
            # Not when time ran out and tokens that the session knows were taken back.
            if heard:
                _SESSIONS[self.target.cache] = self.session, self._everything()
        self.stats.seconds = self.clock.finish()
        if not self.config.return_dict_in_generate:
            return sequences
        return SpeculativeOutput(
            sequences=sequences, cache=self.target.cache, speculation=self.stats, **self.recorder.outputs()
        )

    # ---- parts of the steps ----

    def _propose(self) -> tuple[Draft, list[int]]:
        """The draft to verify, and per row how deep it goes."""
        rows, done = self.active, self.rows.done
        room = [0 if done[row] else self.rows.remaining(row) - 1 for row in rows]
        columns = self.target.rows.room()
        if columns is not None:
            room = [max(0, min(r, columns - 1)) for r in room]
        lengths = [min(w, r) for w, r in zip(self.policy.before(rows, self.session.outlook), room)]
        if not any(lengths):
            self.stats.paused_rounds += any(room)
            return Draft.empty(len(rows), self.device), [0] * len(rows)
        context = self._context(lengths)
        with self.clock("draft"):
            draft = self.session.propose(context)
        draft = _checked(draft, context)
        nodes = int(draft.valid.sum())
        self.stats.drafted += nodes
        if self.threshold is not None:
            draft = self.threshold.cut(draft, [length > 0 for length in room])
        draft = self.policy.cut(draft, [length > 0 for length in room])
        self.stats.paused_rounds += nodes > 0 and not draft.shape[1]
        counts = draft.valid.sum(1).tolist()
        offered = counts if draft.is_chain else torch.where(draft.valid, draft.depth, 0).amax(1).tolist()
        self.stats.offer(offered, sum(counts))
        return draft, offered

    def _more(self, partial: Partial) -> list[bool]:
        """What the policy says of going on, and the caller's own threshold."""
        going = self.policy.more(partial)
        if self.threshold is None:
            return going
        return [a and b for a, b in zip(going, self.threshold.more(partial))]

    def _context(self, lengths: list[int]) -> Context:
        nodes = max(lengths)
        tree = self.target.trees
        if tree:
            room = self.target.rows.room()
            nodes = self.drafter.config.tree_nodes if room is None else min(self.drafter.config.tree_nodes, room - 1)
        return Context(
            anchor=self.anchor,
            position=self.target.rows.lengths,
            lengths=lengths,
            nodes=nodes,
            tree=tree,
            do_sample=self.scorer.do_sample,
            warp=self.scorer.warp,
            more=self._more,
            free_only=self.policy.free_only,
        )

    def _commit_tokens(self, draft: Draft, verdict: Verdict, logits: Tensor, outputs) -> list[list[int]]:
        """Append each row's accepted tokens up to its stop; sets `kept`, the columns of the pass that stay."""
        nodes = draft.shape[1]
        path = verdict.path
        tokens = draft.tokens.to(path.device).gather(1, path.clamp(min=0)) if nodes else path
        # The one place where the host waits for the device.
        packed = torch.cat([verdict.length[:, None], verdict.next_token[:, None], path, tokens], dim=1).tolist()
        depth = path.shape[1]
        committed, self.kept = [], []
        for b, row in enumerate(self.active):
            if self.rows.done[row]:
                committed.append([])
                self.kept.append([])
                continue
            length = packed[b][0]
            where = [0] + [node + 1 for node in packed[b][2 : 2 + length]]
            new = packed[b][2 + depth : 2 + depth + length] + packed[b][1:2]
            self.recorder.row(b, row, where, logits, outputs)
            taken = self.rows.commit(row, new)
            self.recorder.cut(row, len(self.rows.new[row]))
            committed.append(taken)
            self.kept.append(where[: len(taken)])
            if outputs is not None:
                self.passes[row].append(len(taken))
        return committed

    def _rows_to_keep(self) -> list[int] | None:
        """The pass's rows that go on, or None while all stay. Rows stay where the cache is handed back or fixed in
        size; otherwise they leave as soon as a quarter has finished."""
        going = [b for b, row in enumerate(self.active) if not self.rows.done[row]]
        leaving = len(self.active) - len(going)
        if self.handed_back or not going or 4 * leaving < len(self.active) or not self.target.may_drop_rows:
            return None
        return going if leaving else None

    def _end_round(self) -> None:
        self.anchor = torch.tensor([self.rows.new[row][-1] for row in self.active], device=self.device)
        self.rows.check_clock()
        self.rows.stream()

    def _policy(self, synced: bool) -> Policy:
        """Ranks in step must make the same passes, so each keeps on drafting whatever its own clock says."""
        drafter = self.drafter
        constant = self.settings.schedule == "constant"
        inner = FixedLength(self.length, not constant, self.rows.batch)
        name, _ = policies.parsed(drafter.config.policy)
        if synced or name == "fixed":
            return inner
        nodes = drafter.config.tree_nodes if self.target.trees else 0
        depth = inner.lengths[0]
        sampled = self.scorer.do_sample and getattr(drafter.config, "draft_sampling", False)
        if name != "auto":
            columns = self.context_columns
            situation = Situation(self.model, drafter, self.rows.batch, columns, inner, nodes, sampled)
            return policies.make(drafter.config.policy, situation)
        if sampled:
            costs = nominal_costs(self.model, drafter, depth, nodes)
        else:
            costs = costs_of(self.model, drafter, self.rows.batch, self.context_columns, depth, nodes)
        return PaysOff(
            inner,
            costs,
            nodes,
            adaptive=constant and self.settings.length is None and not nodes,
            sequential=drafter.is_sequential,
            free=drafter.is_free,
            free_part=drafter.has_free_part,
        )

    @property
    def _measures(self) -> bool:
        return self.policy.costs is not None and not self.policy.costs.known

    def _measure(self, draft: Draft, before: dict[str, float]) -> None:
        """Tell the policy what this round took and, once it has heard enough, what bare passes take."""
        took = {name: seconds - before[name] for name, seconds in self.clock.snapshot().items()}
        if self.policy.costs.hear(draft.shape[1], took["target"], took["draft"]):
            few = [n for n in (1, 3) if n < draft.shape[1]]
            self.policy.costs.settle({n: min(self._bare_pass(n) for _ in range(2)) for n in (0, *few)})

    def _bare_pass(self, nodes: int) -> float:
        """Seconds of a pass over the anchor and `nodes` nodes, which leaves no trace."""
        before = self.clock.snapshot()["target"]
        empty = torch.zeros(len(self.active), nodes, dtype=torch.long, device=self.device)
        with self.clock("target"):
            self.target.score(self.anchor, Draft.chain(empty, [nodes] * len(self.active)))
        self.target.rows.commit(1 + nodes, [[] for _ in self.active])
        return self.clock.snapshot()["target"] - before

    def _prompts(self, input_ids: Tensor) -> list[list[int]]:
        """Prompt ids of each row without padding (all there are: none when the prompt came as embeddings)."""
        mask = self.target.kwargs.get("attention_mask")
        if mask is None or mask.shape != input_ids.shape:
            return input_ids.tolist()
        return [row[keep].tolist() for row, keep in zip(input_ids, mask.bool().to(input_ids.device))]

    def _everything(self) -> list[list[int]]:
        return [p + new for p, new in zip(self._prompts(self.rows.prompt), self.rows.new)]


def _checked(draft: Draft, context: Context) -> Draft:
    """Hold a drafter to its contract: no more nodes and nothing deeper than asked for, and a tree only where the target
    takes one."""
    draft.is_chain = draft.is_chain or not draft.shape[1] or trees.is_chain(draft.parents, draft.valid)
    if not draft.is_chain and not context.tree:
        raise ValueError(
            "the drafter returned a tree, but this target or cache takes chains only (context.tree is False)"
        )
    if draft.shape[1] > context.nodes:
        raise ValueError(f"the drafter returned {draft.shape[1]} nodes a row, but context.nodes is {context.nodes}")
    within = draft.valid & (draft.depth <= torch.tensor(context.lengths)[:, None])
    return draft if torch.equal(within, draft.valid) else replace(draft, valid=within)


def _resume_or_start(
    cache, past: int, drafter: Drafter, view: TargetView, prompts: list[list[int]]
) -> tuple[Session, list[int]]:
    """The session kept for a handed-back cache when it is this drafter's and knows a prefix of every prompt, else a new
    one; and how many tokens of each prompt it knows."""
    # Taken out, until `finish` puts it back: after an exception it would know more than the cache.
    kept = None if cache is None else _SESSIONS.pop(cache, None)
    if kept is not None and past:
        session, texts = kept
        same = session.drafter is drafter and len(texts) == len(prompts)
        if same and all(prompt[: len(text)] == text for prompt, text in zip(prompts, texts)):
            return session, [len(text) for text in texts]
    return drafter.start(view, len(prompts)), [0] * len(prompts)
