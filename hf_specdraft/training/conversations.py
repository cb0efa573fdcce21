"""Chats as a target reads and writes them: tokens, and which of them the target wrote.

Most chat templates do not mark the assistant's turns, so these are found by rendering. What the template gives for the
messages before a turn, with its generation prompt, is what the target reads; what follows it once the turn is added, up
to the template's stop token, is what the target writes. Prompt and answer are tokenised apart, as they are in decoding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jinja2

from ..publishing.templates import template_sha256

Messages = list[dict[str, Any]]

_PROBE = "specdraft"


@dataclass(frozen=True)
class Written:
    """A turn that the target wrote.

    ids: its tokens without the template's stop token, None where only the text is known. finished: the target ended the
    turn itself, so the stop token that follows is its own too.
    """

    ids: list[int] | None = None
    finished: bool = True


@dataclass
class Sample:
    """One document: tokens, and whether the target wrote each. The first token never counts: nothing predicts it.

    text: the rendering that the tokens stand for, None where no later turn can continue it.
    """

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    text: str | None = None

    def add(self, ids: list[int], written: bool) -> None:
        self.ids += ids
        self.mask += [written] * len(ids)

    def checked(self) -> Sample:
        """The sample up to the last token that the target wrote. ValueError if that is nothing or everything."""
        mask = [False, *self.mask[1:]]
        end = max((i for i, written in enumerate(mask) if written), default=-1) + 1
        if not end:
            raise ValueError("0 % of the chat would be supervised: no token of it is an assistant's")
        if all(self.mask[:end]):
            raise ValueError("100 % of the chat would be supervised: no token before the answer is a user's")
        return Sample(self.ids[:end], mask[:end], self.text)


class ChatEncoder:
    """Tokens and loss masks of chats, for one tokenizer and one set of template arguments (`mode`).

    Without a chat template a chat is one user message, taken as it stands, and its continuation.

    stop: the token that ends a turn in this template (the tokenizer's eos token where the template has none), or None.
    """

    def __init__(self, tokenizer: Any, mode: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.mode = dict(mode or {})
        self.template = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self.special = set(tokenizer.all_special_ids)
        self.special |= {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._stop_text = self._find_stop()
        if self._stop_text is None:
            self.stop = tokenizer.eos_token_id
        else:
            self.stop = tokenizer.convert_tokens_to_ids(self._stop_text)

    def about(self) -> dict[str, Any]:
        """What a data set must say about its chats, named as in a drafter's config ("" without a template)."""
        return {"chat_template_sha256": template_sha256(self.tokenizer), "chat_template_kwargs": self.mode}

    def render(self, messages: Messages, prompt: bool = False) -> str:
        """The chat as text; `prompt` adds what makes the target write the next turn. ValueError where it is refused."""
        if self.template is None:
            if [m["role"] for m in messages] not in (["user"], ["user", "assistant"]):
                raise ValueError("the tokenizer has no chat template: only single prompts can be used")
            return "".join(m["content"] for m in messages)
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, **self.mode
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses this chat: {error}") from error

    def user_prefix(self) -> list[int]:
        """Tokens of the template up to where a user's first message begins. ValueError without a chat template."""
        if self.template is None:
            raise ValueError("the tokenizer has no chat template, so there is no user turn to continue")
        text = self.render([{"role": "user", "content": _PROBE}])
        return self._ids(text[: text.index(_PROBE)])

    def prompt(self, messages: Messages, written: Mapping[int, Written] | None = None) -> list[int]:
        """What the target reads before it writes the next turn, its own earlier turns with the tokens it wrote."""
        samples = self._walk(messages, written or {})
        self._reach(samples, self.render(messages, prompt=True))
        return samples[-1].ids

    def encode(self, messages: Messages, written: Mapping[int, Written] | None = None) -> list[Sample]:
        """The chat's documents: one, or one a turn where the template renders earlier turns anew once more follow.

        messages: role and content each. written: message number -> Written, the turns to supervise; None supervises
        every assistant turn, by the template's own `{% generation %}` marks where it has them.
        Supervised are the turns and their stop tokens. Raises ValueError when that is nothing or everything.
        """
        if written is None and self.template is not None and re.search(r"{%-?\s*generation\s*-?%}", self.template):
            return [self._marked(messages).checked()]
        if written is None:
            written = {i: Written() for i, m in enumerate(messages) if i and m["role"] == "assistant"}
        samples = self._walk(messages, written)
        if not samples:
            raise ValueError("0 % of the chat would be supervised: it has no assistant turn after a prompt")
        return [sample.checked() for sample in samples]

    def _walk(self, messages: Messages, written: Mapping[int, Written]) -> list[Sample]:
        samples: list[Sample] = []
        for i in sorted(written):
            turn, before = written[i], self.render(messages[:i], prompt=True)
            self._reach(samples, before)
            said, stop_text = self._turn(messages[: i + 1], before), self._stop_text
            ids = self._follow(before, said) if turn.ids is None else list(turn.ids)
            if ids and ids[-1] == self.stop:
                ids.pop()
            sample = samples[-1]
            sample.add(ids, True)
            if self.stop is not None:
                # A target may stop with another of its end tokens, which is then the last that it wrote.
                sample.add([self.stop], turn.finished and not (ids and ids[-1] in self.special))
            sample.text = None if stop_text is None else before + said + stop_text
        return samples

    def _reach(self, samples: list[Sample], before: str) -> None:
        """Make the last sample end where `before` does: a longer one, or a new one where the text differs."""
        last = samples[-1] if samples else None
        if last is not None and last.text is not None and before.startswith(last.text):
            last.add(self._follow(last.text, before[len(last.text) :]), False)
        else:
            ids = self._ids(before)
            samples.append(Sample(ids, [False] * len(ids)))

    def _turn(self, messages: Messages, before: str) -> str:
        """The last message as the template has the assistant write it after `before`, without its stop token."""
        content = messages[-1]["content"]
        whole = self.render(messages)
        # Some templates open a thought in the prompt and drop it from the chat: then the content is what was written.
        rest = whole[len(before) :] if whole.startswith(before) else content
        if self._stop_text is not None:
            return rest.partition(self._stop_text)[0]
        at = rest.find(content)
        if at < 0:
            raise ValueError("the chat template changes the answer and has no stop token: its end cannot be found")
        return rest[: at + len(content)]

    def _find_stop(self) -> str | None:
        if self.template is None:
            return None
        text = self.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}])
        for i in self._ids(text[text.rindex(_PROBE) + len(_PROBE) :]):
            if i in self.special:
                return self.tokenizer.convert_ids_to_tokens(i)
        return None

    def _marked(self, messages: Messages) -> Sample:
        out = self.tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **self.mode
        )
        ids, marks = list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]
        mask, inside = [], False
        # Marks may leave the stop token out, or run on over what the template adds behind it.
        for i, (token, marked) in enumerate(zip(ids, marks)):
            began = marked and not (i and marks[i - 1])
            inside = began or (inside and (marked or token == self.stop))
            mask.append(inside)
            inside = inside and token != self.stop
        return Sample(ids, mask)

    def _ids(self, text: str) -> list[int]:
        # A template writes the tokens that a text begins with; without one the tokenizer does.
        return self.tokenizer(text, add_special_tokens=self.template is None)["input_ids"]

    def _follow(self, before: str, text: str) -> list[int]:
        """Tokens of `text` behind `before`; on its own where one token would hold the end of one and start of other."""
        head, whole = self._ids(before), self._ids(before + text)
        if whole[: len(head)] == head:
            return whole[len(head) :]
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]
