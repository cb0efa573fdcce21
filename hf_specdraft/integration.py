"""The doorway: the only file that touches transformers' generation internals.

Three methods of GenerationMixin are routed when the assistant is one of our drafters; every other call reaches upstream
untouched. `custom_generate=speculate(drafter)` does the same without any patch.
"""

from __future__ import annotations

import functools
from typing import Any

import transformers
from packaging.version import Version
from torch import nn
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerationMixin

from .candidates import DraftCandidates, refuse_unsupported
from .decoding import decode
from .drafters.base import Drafter

OLDEST, TOO_NEW = "5.24.0", "5.25.0"
_ROUTED = ("_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator")


def check_version() -> None:
    """Raise ImportError when the installed transformers is not one the doorway was written for."""
    installed = Version(transformers.__version__)
    if not Version(OLDEST) <= installed < Version(TOO_NEW):
        raise ImportError(
            f"hf_specdraft works with transformers >= {OLDEST}, < {TOO_NEW}, but {installed} is installed; "
            f"pip install 'transformers>={OLDEST},<{TOO_NEW}'"
        )


def as_drafter(assistant: Any) -> Drafter | None:
    """The drafter in `assistant`, also beneath PEFT's wrapper (its LoRA layers stay in place), or None."""
    if isinstance(assistant, Drafter):
        return assistant
    if isinstance(assistant, nn.Module) and hasattr(assistant, "get_base_model"):
        base = assistant.get_base_model()
        if isinstance(base, Drafter):
            if getattr(assistant.active_peft_config, "is_prompt_learning", False):
                raise ValueError("prompt-learning adapters act outside the drafter's layers; use LoRA on a drafter")
            return base
    return None


# Settings that make sense for other ways of speculating only, with what to do instead.
_CONFLICTS = {
    "prompt_lookup_num_tokens": "drop it, or drop assistant_model; the 'ngram' family is the better prompt lookup",
    "max_matching_ngram_size": "it belongs to prompt lookup; NgramConfig has its own matching settings",
    "assistant_early_exit": "it makes the target its own drafter; drop it or drop assistant_model",
    "use_mtp": "it makes the target its own drafter; drop it or drop assistant_model",
    "speculation_type": "it selects a loop of transformers; our drafters bring their own",
    "dola_layers": "it compares layers at every step, which transformers does in a decoding method of its own",
    "assistant_ensemble_weight": "it changes the output's law; only lossless verification is done here",
}


def refuse_request(model: nn.Module, config: GenerationConfig, mode: str, drafter: Drafter) -> None:
    """Raise ValueError, with cause and remedy, for requests that speculation cannot serve exactly."""
    for name, remedy in _CONFLICTS.items():
        if getattr(config, name, None):
            raise ValueError(f"{name} cannot be combined with a {type(drafter).__name__}: {remedy}")
    if mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"speculative decoding is greedy search or sampling, but num_beams={config.num_beams} (with penalty_alpha="
            f"{config.penalty_alpha}) asks for {mode.value}; use num_beams=1 or leave assistant_model out"
        )
    if config.use_cache is False:
        raise ValueError("speculative decoding rewinds the cache after every round; leave use_cache at True")
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{type(model).__name__} keeps a recurrent state that cannot be rewound after a rejected draft; generate "
            "without assistant_model"
        )
    if model.config.is_encoder_decoder and config.num_return_sequences > 1:
        raise ValueError(
            "encoder-decoder targets run in transformers' own assisted loop: num_return_sequences must be 1"
        )


@functools.wraps(GenerationMixin._validate_generation_mode)
def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
    drafter = as_drafter(generation_mode_kwargs.get("assistant_model"))
    if drafter is None:
        return _UPSTREAM["_validate_generation_mode"](self, generation_mode, generation_config, generation_mode_kwargs)
    refuse_request(self, generation_config, generation_mode, drafter)


@functools.wraps(GenerationMixin._assisted_decoding)
def _assisted_decoding(
    self,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    synced_gpus=False,
    streamer=None,
    inputs_tensor=None,
    assistant_model=None,
    assistant_tokenizer=None,
    tokenizer=None,
    **model_kwargs,
):
    drafter = as_drafter(assistant_model)
    if drafter is not None and self.config.is_encoder_decoder:
        refuse_unsupported(drafter, input_ids.shape[0], logits_processor, stopping_criteria)
    if drafter is None or self.config.is_encoder_decoder:
        return _UPSTREAM["_assisted_decoding"](
            self,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            inputs_tensor=inputs_tensor,
            assistant_model=assistant_model,
            assistant_tokenizer=assistant_tokenizer,
            tokenizer=tokenizer,
            **model_kwargs,
        )
    return decode(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        drafter.between(tokenizer, assistant_tokenizer),
        streamer=streamer,
        synced_gpus=synced_gpus,
        **model_kwargs,
    )


@functools.wraps(GenerationMixin._get_candidate_generator)
def _get_candidate_generator(
    self, generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs, **kwargs
):
    drafter = as_drafter(kwargs.get("assistant_model"))
    if drafter is None:
        return _UPSTREAM["_get_candidate_generator"](
            self, generation_config, input_ids, inputs_tensor, logits_processor, model_kwargs, **kwargs
        )
    return DraftCandidates(self, drafter, generation_config)


_UPSTREAM: dict[str, Any] = {}


def enable() -> None:
    """Route our drafters. Done by importing the package; calling it again changes nothing."""
    check_version()
    if _UPSTREAM:
        return
    for name in _ROUTED:
        _UPSTREAM[name] = getattr(GenerationMixin, name)
        setattr(GenerationMixin, name, globals()[name])


def disable() -> None:
    """Put upstream's methods back."""
    for name, method in list(_UPSTREAM.items()):
        setattr(GenerationMixin, name, method)
    _UPSTREAM.clear()


def speculate(drafter: Drafter, streamer=None, tokenizer=None, stop_strings: str | list[str] | None = None):
    """A callable for `target.generate(**inputs, custom_generate=...)`: the loop without any patch.

    transformers does not pass a streamer or tokenizer on to such a callable, so they are given here. Raises ValueError
    for stop strings without a tokenizer.
    """
    found = as_drafter(drafter)
    if found is None:
        raise ValueError(f"speculate() takes a drafter of hf_specdraft, got {type(drafter).__name__}")
    if stop_strings is not None and tokenizer is None:
        raise ValueError("stop_strings need the tokenizer: speculate(drafter, tokenizer=..., stop_strings=...)")

    def generate(
        model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, **model_kwargs
    ):
        mode = generation_config.get_generation_mode(found)
        refuse_request(model, generation_config, mode, found)
        if model.config.is_encoder_decoder:
            raise ValueError("encoder-decoder targets take a drafter as assistant_model=, not through custom_generate")
        if stop_strings is not None:
            stopping_criteria.append(StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer))
        if streamer is not None:
            streamer.put(input_ids.cpu())
        return decode(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            found,
            streamer=streamer,
            synced_gpus=synced_gpus,
            **model_kwargs,
        )

    return generate


__all__ = ["as_drafter", "check_version", "disable", "enable", "speculate"]
