"""Policy that cuts old tool results to their beginning and end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fabric.limits import MESSAGES_MAX
from fabric.turn.messages import Message
from router.limits import CUT_RESULT_CHARS_MIN
from router.policies.exchanges import exchanges_of, tool_turns
from router.policies.policy import EditPolicy, PolicyTurn, in_strides, require_within


@dataclass(frozen=True, slots=True)
class TruncateOlderThan(EditPolicy):
    """Cutting of results; the last `n` tool turns, answers with calls and results, stay whole."""

    n: int = 2
    max_chars: int = 200  # of a cut result, including the note about the cut
    tools: tuple[str, ...] = ()  # tools whose results are cut; empty: all
    every: int = 1  # stride of the cut, in tool turns

    def __post_init__(self) -> None:
        """Raise RejectedError for invalid options."""
        require_within("n", self.n, 1, MESSAGES_MAX)
        require_within("max_chars", self.max_chars, CUT_RESULT_CHARS_MIN, None)
        require_within("every", self.every, 1, MESSAGES_MAX)

    def transform(self, messages: Sequence[Message], turn: PolicyTurn) -> Sequence[Message]:
        turns = list(tool_turns(messages))
        old = {*turns[: in_strides(len(turns) - self.n, self.every)]}
        edited = list(messages)
        for each in exchanges_of(messages):
            named = not self.tools or each.use(messages).name in self.tools
            if each.asked_at in old and each.answered_at is not None and named:
                edited[each.answered_at] = self._cut(messages[each.answered_at])
        return edited

    def _cut(self, result: Message) -> Message:
        text = "".join(result.texts)
        if len(text) <= self.max_chars:
            return result
        notice = f"\n[… {len(text):,} characters, cut to their beginning and end …]\n"
        room = self.max_chars - len(notice)
        tail = room // 3
        return replace(result, texts=(text[: room - tail] + notice + text[len(text) - tail :],))
