"""An n-gram drafter and a network drafter as one."""

from __future__ import annotations

from transformers import PreTrainedModel

from .. import families, register
from ..base import Drafter, TargetView, base_module
from ..ngram import NgramDrafter
from .configuration_combined import CombinedConfig
from .session_combined import CombinedSession


@register
class CombinedDrafter(Drafter):
    """Two drafters, saved and loaded as one folder: `ngram.*` (a corpus, if any) and `network.*` are their tensors.

    Drafts are point drafts when the request samples, too: which part drafted depends on what the network drew, so that
    a drawn token would no longer have the law it was drawn from.
    """

    config_class = CombinedConfig
    has_free_part = True

    def __init__(self, config: CombinedConfig):
        super().__init__(config)
        if config.network_config is None:
            raise ValueError("CombinedConfig needs network_config; use CombinedDrafter.from_drafters(ngram, network)")
        self._take(
            NgramDrafter(config.ngram_config), families()[config.network_config.model_type](config.network_config)
        )
        self.post_init()

    @classmethod
    def from_drafters(cls, ngram: NgramDrafter, network: Drafter, **fields) -> CombinedDrafter:
        """Of two loaded drafters, whose weights are shared. `fields` are CombinedConfig's; by default the whole drafts
        as deep as the deeper of the two, and as many nodes as the larger.

        Raises ValueError when `network` has no network.
        """
        parts = ngram.config, network.config
        sizes = {name: max(getattr(part, name) for part in parts) for name in ("num_assistant_tokens", "tree_nodes")}
        config = CombinedConfig(ngram_config=ngram.config, network_config=network.config, **{**sizes, **fields})
        drafter = cls.__new__(cls)
        PreTrainedModel.__init__(drafter, config)
        drafter._take(ngram, network)
        drafter.post_init()
        drafter.training = network.training
        return drafter

    def _take(self, ngram: NgramDrafter, network: Drafter) -> None:
        self.ngram, self.network = ngram, network
        self.feature_layers, self.is_sequential = network.feature_layers, network.is_sequential
        self.wants_rejected = network.wants_rejected

    def init_weights(self) -> None:
        """Nothing: the parts were initialised when they were made, and loaded ones must stay as they are."""

    def _init_weights(self, module) -> None:
        self.network._init_weights(module)

    def save_pretrained(self, *args, **kwargs) -> None:
        """As Drafter.save_pretrained. Raises ValueError while the network carries adapters."""
        if any(base_module(module) is not module for module in self.network.modules()):
            raise ValueError(
                "the network's adapters would not load again as part of a combined drafter; merge them first "
                "(peft_model.merge_and_unload()), then combine and save"
            )
        super().save_pretrained(*args, **kwargs)

    def check(self, view: TargetView) -> None:
        self.ngram.check(view)
        self.network.check(view)

    def between(self, tokenizer, assistant_tokenizer) -> Drafter:
        if self.network.between(tokenizer, assistant_tokenizer) is not self.network:
            raise ValueError(
                "an assistant with a tokenizer of its own cannot be combined with n-grams; use it alone, or leave out "
                "tokenizer and assistant_tokenizer if it speaks the target's tokens"
            )
        return self

    def start(self, view: TargetView, batch: int) -> CombinedSession:
        return CombinedSession(self, view, batch)
