"""A model's chat template, and a trial of its format of calls."""

import inspect
import json
import re
from functools import cached_property
from itertools import product
from typing import Any, Final

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers.utils.chat_template_utils import render_jinja_template

from fabric.errors import RejectedError
from fabric.settings import THINKING_SWITCH
from fabric.turn.alignment import common_prefix
from node.dialect.template_messages import TemplateTraits, adapt_messages

# Other fields of templates for a thought, beside `reasoning_content`.
_THOUGHT_KEYS: Final = ("thinking", "tool_plan", "reasoning")
_READ_KEY: Final = r"""\b\w*(?:message|msg)\w*(?:\.|\.get\(['"]|\[['"])%s\b"""
_USER: Final = {"role": "user", "content": "x"}
_ANSWER: Final = "zebra"  # a text that no template writes by itself
_ANSWERED: Final = {"role": "assistant", "content": _ANSWER}
_CALLED: Final = "firstly"  # name of a function that no template writes by itself
_ARGUMENT: Final = "wombat"  # argument that no template writes by itself
_CALL_ID: Final = "abcdefghi"  # its length is accepted by Mistral's templates


def _mark_start(text: str, end: int, mark: str) -> int:
    """Return where a mark begins that `end` cuts; `end` if it cuts none."""
    first = max(0, end - len(mark) + 1)
    return next((at for at in range(first, end) if text.startswith(mark, at)), end)


class ChatTemplate:
    """Renderer of conversations, up to the start of the answer."""

    def __init__(self, wrapper: TokenizerWrapper, override: str = "") -> None:
        """Use the operator's template, if there is one."""
        self._wrapper = wrapper
        if override:
            wrapper.chat_template = override
            wrapper.has_chat_template = True
            wrapper._chat_template = None  # noqa: SLF001 - of the renderer in Python

    @property
    def exists(self) -> bool:
        return bool(self._wrapper.has_chat_template)

    @cached_property
    def source(self) -> str:
        """Source text of the template, or of a renderer in Python."""
        custom = self._wrapper._chat_template  # noqa: SLF001 - there is no public access
        if custom is not None:
            return inspect.getsource(inspect.getmodule(custom) or custom)
        template = self._wrapper.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else str(template or "")

    def render(
        self,
        messages: list[Any],
        tools: list[Any] | None,
        options: dict[str, Any],
        *,
        opens_answer: bool = True,
    ) -> str:
        """Render a conversation; RejectedError if the template refuses it."""
        if not self.exists:
            return "\n".join(str(message.get("content") or "") for message in messages)
        try:
            text = self._apply(messages, tools, {"add_generation_prompt": opens_answer, **options})
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            # Only the text of a template's raise_exception is known to contain no prompt text.
            detail = error.message if isinstance(error, TemplateError) else type(error).__name__
            message = f"the model's chat template does not accept these messages: {detail}"
            raise RejectedError(message, code="template_refused", param="messages") from None
        return str(text)

    def _apply(self, messages: list[Any], tools: list[Any] | None, options: dict[str, Any]) -> str:
        """Render with these options only: mlx-lm's wrapper would switch thinking on or off."""
        wrapper = self._wrapper
        switch = wrapper._thinking_kwarg  # noqa: SLF001 - as in `source`
        if switch != THINKING_SWITCH and THINKING_SWITCH in options:
            options = {switch: options[THINKING_SWITCH], **options}
            del options[THINKING_SWITCH]
        custom = wrapper._chat_template  # noqa: SLF001
        if custom is not None:
            return str(custom(messages, tools=tools, **options))
        if not any("content" in each and each["content"] is None for each in messages):
            tokenizer = wrapper._tokenizer  # noqa: SLF001
            return str(
                tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
            )
        # The same without the filter of nulls, as some templates depend on them.
        known = {**wrapper.special_tokens_map, **options}
        template = wrapper.get_chat_template(None, tools)
        (text,), _ = render_jinja_template([messages], tools, chat_template=template, **known)
        return str(text)

    def answer_start(
        self,
        prompt: str,
        messages: list[Any],
        tools: list[Any] | None,
        options: dict[str, Any],
        marks: tuple[str, ...],
        *,
        continues: bool = False,
    ) -> int:
        """Return where in a rendered prompt the model's own text begins, after any header.

        It is found by rendering the same messages without an answer, so that no client's text can
        be taken for a header. `marks`: those of thoughts, which belong to the answer. With
        `continues`, the last message is the answer's beginning.
        """
        before = messages[:-1] if continues else messages
        try:
            closed = self.render(before, tools, options, opens_answer=False) if before else ""
            opened = self.render(before, tools, options) if continues else prompt
        except RejectedError:
            return len(prompt)
        start = common_prefix(opened, closed)
        start = min([start, *(_mark_start(opened, start, mark) for mark in marks)])
        places = (opened.find(mark, start) for mark in marks)
        end = min((at for at in places if at >= 0), default=len(opened))
        if not continues or prompt.startswith(opened[:end]):
            return end
        return common_prefix(prompt, opened)

    def begun_at_end(self, prompt: str, marks: tuple[str, ...]) -> str:
        """Return the beginning of an answer at a text prompt's end, as the template opens them."""
        openings = [text for text in self._openings if text and prompt.endswith(text)]
        opening = max(openings, key=len, default="")
        places = (opening.find(mark) for mark in marks)
        return opening[min((at for at in places if at >= 0), default=len(opening)) :]

    @cached_property
    def _openings(self) -> tuple[str, ...]:
        """Texts that the template writes before answers: to a question, and to a tool's result."""
        function = {"name": "f", "arguments": {"q": "v"}}
        use = {"type": "function", "id": _CALL_ID, "function": function}
        called: list[dict[str, Any]] = [
            _USER,
            {"role": "assistant", "content": "", "tool_calls": [use]},
            {"role": "tool", "content": "r", "name": "f", "tool_call_id": _CALL_ID},
        ]
        return self._opening([_USER]), self._opening(adapt_messages(called, self.traits))

    def _opening(self, messages: list[Any]) -> str:
        try:
            opened = self.render(messages, None, {})
            closed = self.render(messages, None, {}, opens_answer=False)
        except RejectedError:
            return ""
        return opened[common_prefix(opened, closed) :]

    @cached_property
    def turn_end(self) -> str:
        """Text that the template writes after every answer."""
        last = self._around_answer([_USER, _ANSWERED])[1]
        followed = self._around_answer([_USER, _ANSWERED, _USER])[1]
        return last[: common_prefix(last, followed)]

    @cached_property
    def answer_opening(self) -> str:
        """Text that the template writes between the start of an answer and its content."""
        before = self._around_answer([_USER, _ANSWERED])[0]
        try:
            prompt = self.render([_USER], None, {})
        except RejectedError:
            return ""
        return before[common_prefix(before, prompt) :]

    def _around_answer(self, messages: list[Any]) -> tuple[str, str]:
        try:
            before, _, after = self.render(messages, None, {}, opens_answer=False).rpartition(
                _ANSWER
            )
        except RejectedError:
            return "", ""
        return before, after

    def is_within_answers(self, mark: str) -> bool:
        """Return whether answers with a thought or a call have a mark more often than others."""
        thoughts = dict.fromkeys(("reasoning_content", *_THOUGHT_KEYS), "y")
        call = {"type": "function", "id": _CALL_ID, "function": {"name": "f", "arguments": {}}}
        plain, *others = (
            self._count(mark, {**_ANSWERED, **more})
            for more in ({}, thoughts, {"tool_calls": [call]}, {**thoughts, "tool_calls": [call]})
        )
        return max(others) > plain

    def _count(self, mark: str, message: dict[str, Any]) -> int:
        try:
            return self.render([_USER, message], None, {}, opens_answer=False).count(mark)
        except RejectedError:
            return 0

    @cached_property
    def traits(self) -> TemplateTraits:
        """Detect the template's format of calls by rendering one."""
        as_object = {"q": _ARGUMENT}
        as_text = json.dumps(as_object)
        empty, null = self._render_call("", as_object), self._render_call(None, as_object)
        null_text = self._render_call(None, as_text) if null is None else null
        rendered = empty or self._render_call("", as_text) or ""
        takes_null = null_text is not None and null_text.count("None") <= rendered.count("None")
        best, other = (null, null_text) if takes_null else (empty, rendered)
        keys = (key for key in _THOUGHT_KEYS if re.search(_READ_KEY % key, self.source))
        return TemplateTraits(
            takes_null=takes_null,
            text_arguments=bool(other) if best is None else "{'q'" in best,
            thought_keys=tuple(keys),
            takes_calls=not self._drops_calls,
            takes_one_call=self._takes_one_call,
        )

    def _render_call(
        self, content: str | None, arguments: Any, tools: list[Any] | None = None
    ) -> str | None:
        """Render a call and its result; None if the template refuses them."""
        call = {"name": _CALLED, "arguments": arguments}
        use = {"type": "function", "id": _CALL_ID, "function": call}
        answer = {"role": "assistant", "content": content, "tool_calls": [use]}
        result = {"role": "tool", "content": _ANSWER, "name": "f", "tool_call_id": _CALL_ID}
        try:
            return self.render([_USER, answer, result], tools, {})
        except RejectedError:
            return None

    @property
    def _drops_calls(self) -> bool:
        """Return whether the template takes a call and its result, and leaves one of them out.

        Some write the id of a call in place of its name.
        """
        function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
        shown = None, [{"type": "function", "function": function}]
        arguments = {"q": _ARGUMENT}
        forms = product(("", None), (arguments, json.dumps(arguments)), shown)
        texts = [text for form in forms if (text := self._render_call(*form)) is not None]
        return bool(texts) and not any(
            (_CALLED in text or _ARGUMENT in text) and _ANSWER in text for text in texts
        )

    @property
    def _takes_one_call(self) -> bool:
        """Return whether the template silently drops a message's second call."""
        uses = [
            {"type": "function", "id": id_, "function": {"name": name, "arguments": {}}}
            for id_, name in ((_CALL_ID, "firstly"), ("abcdefghj", "secondly"))
        ]
        try:
            text = self.render([_USER, {"role": "assistant", "tool_calls": uses}], None, {})
        except RejectedError:
            return False
        return "firstly" in text and "secondly" not in text
