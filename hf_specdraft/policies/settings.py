"""The assistant settings of one call."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import GenerationConfig

_UPSTREAM = GenerationConfig._get_default_generation_params()


@dataclass
class Settings:
    """The assistant settings of one call; None where the caller left transformers' default."""

    length: int | None = None
    schedule: str = "constant"
    confidence_threshold: float | None = None

    @classmethod
    def of(cls, config: GenerationConfig) -> Settings:
        """Read them from a prepared generation config, in which upstream's merged default counts as unset."""

        def given(name):
            value = getattr(config, name, None)
            return None if value == _UPSTREAM[name] else value

        settings = cls(
            length=given("num_assistant_tokens"),
            schedule=config.num_assistant_tokens_schedule or "constant",
            confidence_threshold=given("assistant_confidence_threshold"),
        )
        if settings.length is not None and settings.length < 1:
            raise ValueError(
                f"num_assistant_tokens is {settings.length}; it must be at least 1. To generate without drafting, "
                "leave assistant_model out"
            )
        threshold = settings.confidence_threshold
        if threshold is not None and not 0 <= threshold <= 1:
            raise ValueError(f"assistant_confidence_threshold is {threshold}; it must be between 0 and 1")
        if settings.schedule not in ("constant", "heuristic", "heuristic_transient"):
            raise ValueError(
                f"num_assistant_tokens_schedule {settings.schedule!r} is not known; use 'constant' or 'heuristic'"
            )
        return settings
