"""The assistant model, and the session that keeps its cache in step with what the target commits."""

from __future__ import annotations

import inspect
from functools import cached_property

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from ...acceptance import AcceptanceHead, Mixture
from ...cache import RowCache, can_realign, record_past
from ...draft import Commit, Context, Draft, Law, Partial
from ...parts import Scored, build
from ...training.anchors import choose_anchors, following
from ...training.features import TargetLaw
from ...training.records import TrainingBatch, Unrolled
from ...verification import argmax, sample
from .. import register
from ..base import Drafter, Session, TargetView, base_module
from .configuration_assistant import AssistantConfig
from .translation import translated


@register
class AssistantDrafter(Drafter):
    """A causal LM that drafts token by token (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

    Its tokenizer should be the target's. When it is not, give generate both tokenizers (`tokenizer=`,
    `assistant_tokenizer=`): drafts then travel as text.
    """

    config_class = AssistantConfig
    is_sequential = True
    _keep_in_fp32_modules_strict = ["acceptance_head"]

    def __init__(self, config: AssistantConfig):
        super().__init__(config)
        if config.assistant_config is None:
            raise ValueError("AssistantConfig needs assistant_config; use AssistantDrafter.from_model(model)")
        self._take(AutoModelForCausalLM.from_config(config.assistant_config))
        self.post_init()

    @classmethod
    def from_model(cls, model: PreTrainedModel, **fields) -> AssistantDrafter:
        """Wrap a loaded causal LM, sharing its weights; its mode stays as it is. `fields` are AssistantConfig's.

        A PEFT model is taken with its layers in place. Raises ValueError for what is no decoder-only language model.
        """
        if hasattr(model, "get_base_model"):
            if getattr(model.active_peft_config, "is_prompt_learning", False):
                raise ValueError("prompt-learning adapters act outside the assistant's layers; use LoRA instead")
            model = model.get_base_model()
        if model.config.is_encoder_decoder or not model.can_generate():
            raise ValueError(f"{type(model).__name__} is no decoder-only language model")
        drafter = cls.__new__(cls)
        PreTrainedModel.__init__(drafter, AssistantConfig(assistant_config=model.config, **fields))
        drafter._take(model)
        drafter.post_init()
        drafter.training = model.training
        return drafter

    def _take(self, model: PreTrainedModel) -> None:
        self.model = model
        width = model.config.get_text_config(decoder=True).hidden_size
        self.acceptance_head = build("acceptance_head", AcceptanceHead, self.config.acceptance_head, width)

    def init_weights(self) -> None:
        """Nothing: the model was initialised and tied when it was made, and a loaded one must stay as it is."""

    def _init_weights(self, module) -> None:
        self.model._init_weights(module)

    def save_pretrained(self, *args, **kwargs) -> None:
        """As PreTrainedModel.save_pretrained. Raises ValueError while the assistant carries adapters."""
        if any(base_module(module) is not module for module in self.model.modules()):
            raise ValueError(
                "the assistant's adapters would not load again as part of a drafter; merge them first "
                "(peft_model.merge_and_unload()), then make and save the drafter"
            )
        super().save_pretrained(*args, **kwargs)

    def check(self, view: TargetView) -> None:
        super().check(view)
        self.check_drafting()

    def check_drafting(self) -> None:
        """Raise ValueError when the assistant's cache cannot be cut back, whatever the target."""
        if not can_realign(DynamicCache(config=self.config.assistant_config.get_text_config(decoder=True))):
            raise ValueError(
                f"the assistant ({self.config.assistant_config.model_type}) keeps a state that cannot be cut back; use "
                "an attention-only assistant"
            )

    def between(self, tokenizer, assistant_tokenizer) -> Drafter:
        if tokenizer is None or not hasattr(assistant_tokenizer, "decode"):
            return self
        return translated(self, tokenizer, assistant_tokenizer)

    def draft_pass(self, *args, **kwargs):
        """The assistant's own forward."""
        return self.model(*args, **kwargs)

    def unroll(
        self,
        view: TargetView,
        batch: TrainingBatch,
        anchors: int | None = None,
        slots: int | None = 1,
        mix: float = 0.15,
        generator: torch.Generator | None = None,
    ) -> Unrolled:
        """The assistant's states along the texts, as plain fine-tuning has them (FastDraft, 2411.11055).

        anchors: how many of each document (`choose_anchors`), all by default: they cost the vocabulary side only.
        slots: one, as a draft's later tokens are the first ones of later anchors. With None (num_assistant_tokens) the
            matches with the target's text are those of drafting, for `simulation.simulate`.
        mix: share of the text's tokens in what an acceptance head learns from, the others being the assistant's own
            (SpecDec++, 2405.19715).
        """
        batch = batch.to(self.device)
        real = batch.document_ids > 0
        # Documents apart: every architecture takes an ordinary right-padded batch.
        document = ((batch.position_ids == 0) & real).flatten().cumsum(0) - 1
        place = document.clamp(min=0), batch.position_ids.flatten()
        size = int(document[-1]) + 1, int(batch.position_ids[real].max()) + 1
        ids, mask = (torch.zeros(size, dtype=torch.long, device=self.device) for _ in range(2))
        known = tuple(index[real.flatten()] for index in place)
        rows = self.model.config.get_text_config(decoder=True).vocab_size
        ids[known], mask[known] = batch.input_ids[real].clamp(max=rows - 1), 1
        states = self._states(ids, mask)
        context = None
        if self.acceptance_head is not None:
            written = torch.zeros_like(mask, dtype=torch.bool)
            written[known] = batch.loss_mask[real]
            context = self._mixture(view, ids, mask, states, written, mix, generator)
            context = Mixture(context.tokens[place], context.judged[place], context.states[place])
        starts = choose_anchors(batch, anchors, generator).flatten().nonzero().flatten()
        slots = self.config.num_assistant_tokens if slots is None else slots
        labels, before, valid = following(batch, starts, slots)
        hidden = states[tuple(index[before] for index in place)]
        return Unrolled(hidden, labels, before, valid, anchors=starts, context=context)

    def _states(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state

    @torch.no_grad()
    def _mixture(self, view, ids, mask, states, written, mix, generator) -> Mixture:
        """Of documents [D, W]: `written` tokens are replaced by the assistant's own draws, but for a share `mix`."""
        drawn = ids.clone()
        for row, state in zip(drawn, states):  # one document's logits at a time
            law = self.logits(view, state[:-1]).float().softmax(-1).cpu()
            row[1:] = torch.multinomial(law, 1, generator=generator)[:, 0].to(row.device)
        judged = written & (torch.rand(ids.shape, generator=generator).to(ids.device) >= mix)
        judged[:, 0] = False
        return Mixture(drawn, judged, self._states(drawn.where(judged, ids), mask))

    def score(self, view: TargetView, unrolled: Unrolled) -> Scored:
        scored = super().score(view, unrolled)
        if unrolled.context is not None:
            self.acceptance_head.teach(unrolled, scored)
        return scored

    def logits(self, view: TargetView, hidden: Tensor) -> Tensor:
        raw = self.model.get_output_embeddings()(hidden)
        # Rows that the target does not have are never drafted.
        return self._law.shaped(raw)[..., : view.vocab_size]

    @cached_property
    def _law(self) -> TargetLaw:
        return TargetLaw(self.model)

    def start(self, view: TargetView, batch: int) -> AssistantSession:
        return AssistantSession(self, view.vocab_size, batch)


class AssistantSession(Session):
    """The rows' texts, and a cache that lags behind them: what is missing is fed at the next draft."""

    def __init__(self, drafter: AssistantDrafter, vocab_size: int, batch: int):
        self.drafter = drafter
        self.model = drafter.model
        text = self.model.config.get_text_config(decoder=True)
        self.vocab_size, self.own_vocab = vocab_size, text.vocab_size
        self.texts: list[list[int]] = [[] for _ in range(batch)]
        cache = DynamicCache(config=text)
        record_past(cache, True)
        self.rows = RowCache(cache, batch, None)
        self.fed = [0] * batch
        # Drafted tokens that went through the assistant beyond `fed`: their columns stay if they turn out right.
        self.pending: list[list[int]] = [[] for _ in range(batch)]
        self.takes_positions = "position_ids" in inspect.signature(self.model.forward).parameters
        self.keeps_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def observe(self, commit: Commit) -> None:
        width = max(map(len, self.pending), default=0)
        right = []
        for text, new, guessed in zip(self.texts, commit.tokens, self.pending):
            # The last token is fed anew: its logits are what drafting starts from. A draft that was cut before the
            # pass may have guessed it.
            limit, count = min(len(new) - 1, len(guessed)), 0
            while count < limit and new[count] == guessed[count]:
                count += 1
            right.append(count)
            text += new
        if width:
            self.rows.commit(width, [list(range(count)) for count in right])
            self.fed = [fed + count for fed, count in zip(self.fed, right)]
            self.pending = [[] for _ in self.texts]

    def keep(self, rows: list[int]) -> None:
        self.rows.commit(0, [[] for _ in self.texts], rows)
        self.texts, self.fed, self.pending = ([part[r] for r in rows] for part in (self.texts, self.fed, self.pending))

    def replace(self, texts: list[list[int]]) -> None:
        """These are the rows' texts now; what the cache shares with them stays."""
        self._forget_pending()
        same = []
        for new, old, fed in zip(texts, self.texts, self.fed):
            # The last token is fed anew: its logits are what drafting starts from.
            limit, count = min(fed, len(new) - 1), 0
            while count < limit and new[count] == old[count]:
                count += 1
            same.append(count)
        self.rows.cut([fed - count for fed, count in zip(self.fed, same)])
        self.texts, self.fed = [list(text) for text in texts], same

    def propose(self, context: Context) -> Draft:
        self._forget_pending()
        logits, hidden = self._catch_up(context.anchor.device)
        # A chain, where a tree is wanted too: it has no more tokens than nodes are allowed.
        lengths = [min(length, context.nodes) for length in context.lengths]
        depth = max(lengths)
        drawn = context.do_sample and self.drafter.config.draft_sampling
        tokens, laws, confidence = [], [], []
        for step in range(depth):
            logits = logits[:, : self.vocab_size].float()
            confidence.append(logits.amax(-1) - logits.logsumexp(-1))
            if drawn:
                # Warpers may leave nothing of a vocabulary, or the assistant say NaN: then this is no law, and token 0.
                logits = context.warp(logits)
                law = logits.softmax(-1)
                token = sample(law, torch.rand(len(law), device=law.device))
                laws.append(law)
            else:
                token = argmax(logits)
            tokens.append(token)
            if step + 1 < max(lengths):
                # Stop AFTER an unsure token: it stays in the draft, so nothing is chosen by what was drawn.
                going = context.more(Partial(step + 1, token, logits, hidden, hidden))
                lengths = [n if goes else min(n, step + 1) for n, goes in zip(lengths, going)]
            if step + 1 >= max(lengths):
                break
            logits, hidden = self._step(token)
            for guessed, t in zip(self.pending, token.tolist()):
                guessed.append(t)
        stacked = torch.stack(tokens, dim=1)
        return Draft.chain(
            stacked.to(context.anchor.device),
            [min(n, len(tokens)) for n in lengths],
            law=Law(torch.stack(laws, dim=1), None, torch.ones(len(lengths), dtype=torch.bool)) if drawn else None,
            confidence=torch.stack(confidence, dim=1).cumsum(1).exp().nan_to_num(0),
            confidence_kind="pre",
        )

    def _forget_pending(self) -> None:
        """Drop what a draft that was never verified left in the cache."""
        width = max(map(len, self.pending), default=0)
        if width:
            self.rows.commit(width, [[] for _ in self.texts])
            self.pending = [[] for _ in self.texts]

    def _catch_up(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Feed every row's missing tokens; [B, Va] logits after each row's last, and [B, H] states (see `_forward`)."""
        missing = [text[fed:] for text, fed in zip(self.texts, self.fed)]
        counts, width = list(map(len, missing)), max(map(len, missing))
        first = self.rows.columns == 0
        # The prompt is padded on the left, as generate does, so that one column of logits is enough; later tokens on
        # the right, so that columns keep the distance of positions, and the gaps are cut out afterwards.
        rows = [[0] * (width - len(m)) + m if first else m + [0] * (width - len(m)) for m in missing]
        ids = torch.tensor(rows, device=self.model.device).clamp_(max=self.own_vocab - 1)
        mask = self.rows.mask_for(width)
        start = torch.tensor([[fed - (width - count if first else 0)] for fed, count in zip(self.fed, counts)])
        positions = (start + torch.arange(width)).clamp(min=0)
        if first and min(counts) < width:
            mask = (torch.arange(width) >= width - torch.tensor(counts)[:, None]).long()
        logits, hidden = self._forward(ids, mask, positions, 1 if first else width)
        if first:
            cache = self.rows.cache
            self.rows = RowCache(cache, len(counts), None if mask is None else mask.to(ids.device))
            self.rows.commit(0, [[] for _ in counts])
            at = torch.full((len(counts),), -1, device=logits.device)
        else:
            self.rows.commit(width, [list(range(count)) for count in counts])
            at = torch.tensor(counts, device=logits.device) - 1
        self.fed = [fed + count for fed, count in zip(self.fed, counts)]
        row = torch.arange(len(counts), device=logits.device)
        return logits[row, at], None if hidden is None else hidden[row, at]

    def _step(self, token: Tensor) -> tuple[Tensor, Tensor | None]:
        ahead = len(self.pending[0])
        ids = token[:, None].clamp(max=self.own_vocab - 1)
        positions = torch.tensor(self.fed)[:, None] + ahead
        logits, hidden = self._forward(ids, self.rows.mask_for(ahead + 1), positions, 1)
        return logits[:, -1], None if hidden is None else hidden[:, -1]

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, keep: int) -> tuple[Tensor, Tensor | None]:
        """Logits of the last `keep` columns, and, for a drafter with an acceptance head, [B, W, H] of all columns what
        the head of the assistant reads."""
        inputs = {"input_ids": ids, "attention_mask": None if mask is None else mask.to(ids.device)}
        if self.takes_positions:
            inputs["position_ids"] = positions.to(ids.device)
        if self.keeps_logits:
            inputs["logits_to_keep"] = keep
        rated = self.drafter.acceptance_head is not None
        out = self.model(**inputs, cache=self.rows.cache, use_cache=True, output_hidden_states=rated)
        return out.logits, out.hidden_states[-1] if rated else None
