"""Which chat template and mode a drafter was trained on, and whether a prompt uses another.

A drafter learns what follows the target's words in one format. Under another template, or with thinking switched on
where it was trained with it off, the output stays right and acceptance falls, so nothing else tells.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..drafters.base import Drafter

_PROBE = [{"role": "user", "content": "Hello"}]


def template_sha256(tokenizer: Any) -> str:
    """Checksum of the text of a tokenizer's (default) chat template; "" when it has none."""
    template = getattr(tokenizer, "chat_template", None)
    template = template.get("default") if isinstance(template, dict) else template
    return hashlib.sha256(template.encode()).hexdigest() if template else ""


def described(sha256: str, kwargs: dict | None) -> str:
    """A template and mode in words."""
    if not sha256:
        return "plain text without a chat template"
    mode = ", ".join(f"{key}={value!r}" for key, value in sorted((kwargs or {}).items()))
    return f"the chat template {sha256[:12]} " + (f"rendered with {mode}" if mode else "in its default mode")


def template_mismatch(drafter: Drafter, tokenizer: Any, kwargs: dict | None) -> str | None:
    """What differs between the prompts a drafter was trained on and those it is about to see, in one line.

    kwargs: what the prompts' chat template is rendered with ({} for its default mode), None for prompts that go
    without one. Returns None when nothing differs or the drafter does not say what it was trained on.
    """
    trained, trained_kwargs = drafter.config.chat_template_sha256, drafter.config.chat_template_kwargs or {}
    if trained is None:
        return None
    used = "" if kwargs is None else template_sha256(tokenizer)
    if used == trained and (not used or _same_mode(tokenizer, trained_kwargs, kwargs)):
        return None
    return (
        f"the drafter was trained on {described(trained, trained_kwargs)}, but these prompts use "
        f"{described(used, kwargs)}; the output is right all the same, but fewer drafts will be accepted"
    )


def _same_mode(tokenizer: Any, trained: dict, used: dict) -> bool:
    """Whether a prompt comes out the same under both: most kwargs are defaults written out, or act on nothing."""
    if trained == used:
        return True
    first, second = (
        tokenizer.apply_chat_template(_PROBE, tokenize=False, add_generation_prompt=True, **kwargs)
        for kwargs in (trained, used)
    )
    return first == second
