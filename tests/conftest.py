"""Tiny targets, and drafters whose acceptance is scripted."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdraft.draft import Commit, Context, Draft
from hf_specdraft.drafters import Drafter, DrafterConfig, Session


def tiny_llama(seed: int = 0, vocab: int = 64, **overrides) -> LlamaForCausalLM:
    """The target T of the field cases: hidden 32, 2 layers, weights of standard deviation 0.5."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **overrides,
    )
    return LlamaForCausalLM(config).eval()


class ScriptedConfig(DrafterConfig):
    model_type = "specdraft_scripted"
    policy: str = "fixed"


class ScriptedDrafter(Drafter):
    """Proposes from known answers: `script(round) -> how many of the next tokens are right` (the rest are wrong).

    answers: per row, the full row (prompt without padding, and plain's new tokens). tree: also offers wrong siblings,
    so that the right branch is never the first.
    """

    config_class = ScriptedConfig

    def __init__(self, answers, script, length, tree=False, vocab=64):
        super().__init__(ScriptedConfig(num_assistant_tokens=length, tree_nodes=3 * length if tree else 0))
        self.answers, self.script, self.tree, self.vocab = answers, script, tree, vocab

    def start(self, view, batch):
        return ScriptedSession(self, batch)


class ScriptedSession(Session):
    def __init__(self, drafter, batch):
        self.drafter = drafter
        self.texts = [[] for _ in range(batch)]
        self.rows = list(range(batch))
        self.rounds = [0] * batch

    def observe(self, commit: Commit):
        for text, tokens in zip(self.texts, commit.tokens):
            text += tokens

    def keep(self, rows):
        self.texts = [self.texts[r] for r in rows]
        self.rows = [self.rows[r] for r in rows]
        self.rounds = [self.rounds[r] for r in rows]

    def propose(self, context: Context) -> Draft:
        chains = []
        for b, text in enumerate(self.texts):
            length = context.lengths[b]
            if not length:
                chains.append([])
                continue
            answer = self.drafter.answers[self.rows[b]]
            right = self.drafter.script[self.rows[b] % len(self.drafter.script)](self.rounds[b])
            self.rounds[b] += 1
            chain = []
            for i in range(length):
                at = len(text) + i
                truth = answer[at] if at < len(answer) else 1
                chain.append(truth if i < right else (truth + 1) % self.drafter.vocab)
            chains.append(chain)
        width = max(map(len, chains))
        device = context.anchor.device
        if not context.tree:
            tokens = torch.tensor([c + [0] * (width - len(c)) for c in chains], dtype=torch.long, device=device)
            return Draft.chain(tokens.view(len(chains), width), [len(c) for c in chains])
        tokens, parents, valid = [], [], []
        width = min(width, context.nodes // 3)
        if not width:
            return Draft.empty(len(chains), device)
        for chain in (c[:width] for c in chains):
            t, p, parent = [], [], -1
            for token in chain:
                # Two wrong siblings before the scripted one.
                t += [(token + 2) % self.drafter.vocab, (token + 3) % self.drafter.vocab, token]
                p += [parent] * 3
                parent = len(t) - 1
            pad = 3 * width - len(t)
            valid.append([True] * len(t) + [False] * pad)
            tokens.append(t + [0] * pad)
            parents.append(p + [-1] * pad)
        return Draft(torch.tensor(tokens, device=device), torch.tensor(parents), torch.tensor(valid))


def oracle(k):
    return lambda r: k


def adversary(r):
    return 0


def mixed(k):
    return lambda r: r % (k + 1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
