"""Trial of a model's answer format: read back what its own chat template writes."""

from collections.abc import Iterable
from dataclasses import replace
from json import loads
from typing import Any, Final

from fabric.errors import RejectedError
from fabric.turn.alignment import common_prefix
from node.dialect.formats import AnswerFormat
from node.dialect.marked_reader import MarkedReader
from node.dialect.template_messages import adapt_messages, alternative_forms
from node.mlx.chat_template import ChatTemplate

CALLS: Final = "tool calls"
THOUGHTS: Final = "thoughts"
_NAME, _ARGUMENTS = "probe_tool", {"probe_key": "probed value"}
_THOUGHT, _TEXT = "probed thought", "probed text"
_USER: Final = {"role": "user", "content": "probed question"}
_TOOLS: Final[list[Any]] = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "Probe.",
            "parameters": {
                "type": "object",
                "properties": {"probe_key": {"type": "string", "description": "Probed."}},
                "required": ["probe_key"],
            },
        },
    }
]


class FormatTrial:
    """Trial of one template and the format that its signs select."""

    def __init__(
        self, template: ChatTemplate, format_: AnswerFormat, end_texts: Iterable[str]
    ) -> None:
        self._template = template
        self._format = format_
        self._end_texts = tuple(end_texts)

    def unread(self) -> tuple[str, ...]:
        """Name the parts of answers that the template writes and the format cannot read."""
        if self._format.messages is not None or not self._template.exists:
            return ()
        parts = ((CALLS, self._reads_calls()), (THOUGHTS, self._reads_thoughts()))
        return tuple(part for part, is_read in parts if not is_read)

    def _reads_calls(self) -> bool:
        function = {"name": _NAME, "arguments": _ARGUMENTS}
        use = {"type": "function", "id": "abcdefghi", "function": function}
        written = self._write_answer({"role": "assistant", "content": "", "tool_calls": [use]})
        if written is None or _NAME not in written or "probed value" not in written:
            return True  # nothing to read
        reader = MarkedReader(replace(self._format, thought=None), (), _TOOLS, "")
        shown = [reader.feed(written), reader.finish()]
        calls = [call for delta in shown for call in delta.calls if not call.is_broken]
        return any(call.name == _NAME and loads(call.arguments) == _ARGUMENTS for call in calls)

    def _reads_thoughts(self) -> bool:
        answer = {"role": "assistant", "content": _TEXT, "reasoning_content": _THOUGHT}
        written = self._write_answer(answer)
        if written is None or _THOUGHT not in written:
            return True
        reader = MarkedReader(self._format, (), None, "")
        shown = [reader.feed(written), reader.finish()]
        return "".join(delta.reasoning for delta in shown).strip() == _THOUGHT

    def _write_answer(self, answer: dict[str, Any]) -> str | None:
        """Return an answer as the template writes it, without its header; None if it refuses."""
        template = self._template
        (answer,) = adapt_messages([answer], template.traits)
        thought = self._format.thought
        marks = ("</think>", *((thought.start, thought.end) if thought is not None else ()))
        try:
            closed = template.render([_USER], _TOOLS, {}, opens_answer=False)
            opened = template.render([_USER], _TOOLS, {})
            start = template.answer_start(opened, [_USER], _TOOLS, {}, marks)
            whole = self._render([_USER, answer])
        except RejectedError:
            return None
        header = opened[common_prefix(opened, closed) : start]
        written = whole[common_prefix(whole, closed) :]
        written = written.removeprefix(header).rstrip()
        for end in self._end_texts:
            written = written.removesuffix(end)
        return written

    def _render(self, messages: list[dict[str, Any]]) -> str:
        for form in (messages, *alternative_forms(messages)):
            try:
                return self._template.render(form, _TOOLS, {}, opens_answer=False)
            except RejectedError as error:
                refusal = error
        raise refusal
