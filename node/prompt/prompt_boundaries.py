"""Where a prompt's parts end, and a system prompt that stays the same from day to day.

`PromptBoundaries` renders shorter versions of the conversation and compares the results, so it
needs no knowledge of the template's tokens, and a user who types such a token cannot confuse it.
Boundaries decide where recurrent states are kept and by which text a conversation is recognized;
they never change the tokens that the model reads.

`move_date_lines` moves lines with today's date from the system prompt to the first user message,
so that tomorrow's prompt has the same prefix.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fabric.errors import RejectedError
from fabric.limits import BLOCK_TOKENS
from fabric.turn.alignment import common_prefix
from fabric.turn.conversation_form import DATE_LINE
from fabric.turn.generation import GenerateRequest
from fabric.turn.messages import Message, MessageRole, template_form
from fabric.turn.prompt_plan import PromptMarks, PromptPlan
from node.limits import ANSWER_OPENINGS_MAX
from node.mlx.chat_tokenizer import ChatTokenizer


def move_date_lines(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with the system prompt's dates at the start of the user's first."""
    users = (at for at, message in enumerate(messages) if message.role is MessageRole.USER)
    first = next(users, len(messages))
    moved, kept = [], []
    for message in messages[:first]:
        text = "".join(message.texts)
        lines = [line.strip() for line in DATE_LINE.findall(text)]
        rest = DATE_LINE.sub("", text).rstrip("\n") if lines else text
        is_moved = message.role is MessageRole.SYSTEM and bool(rest)
        moved += lines if is_moved else []
        kept.append(replace(message, texts=(rest,)) if is_moved and lines else message)
    if not moved or first == len(messages):
        return messages
    text = "\n".join(moved) + "\n\n" + "".join(messages[first].texts)
    return [*kept, replace(messages[first], texts=(text,)), *messages[first + 1 :]]


_OTHER = Message(MessageRole.USER, ("\N{REPLACEMENT CHARACTER}",))  # begins no message
_UNTRIMMED = "\N{REPLACEMENT CHARACTER} \n"
_ANSWER = replace(_OTHER, role=MessageRole.ASSISTANT, texts=(_UNTRIMMED,))

Render = Callable[[Sequence[Message]], bytes]


@dataclass(slots=True, eq=False)
class PromptBoundaries:
    """Finder of one template's boundaries; keeps the openings of answers it has seen."""

    tokenizer: ChatTokenizer
    _openings: tuple[bytes, ...] = ()  # the longest first; replaced whole, as threads read it

    def find(self, request: GenerateRequest, plan: PromptPlan, *, has_states: bool) -> PromptMarks:
        """Return the marks of a chat's prompt; fewer for a model without recurrent states."""
        messages = request.messages
        if not messages:
            return PromptMarks()

        def render(part: Sequence[Message]) -> bytes:
            spelled = [template_form(message) for message in part]
            try:
                text = self.tokenizer.render(
                    spelled, request.tools, request.template_options, opens_answer=False
                )
            except RejectedError:  # templates may refuse a part of a conversation
                return b""
            return text.encode()

        if request.continues:  # the begun answer does not belong to the conversation yet
            conversation = self._tokens_before_special(messages[:-1], plan, render)
        else:
            conversation = self._conversation(messages, plan, render)
        opening = plan.ids[conversation + 1 :] if conversation else ()
        opens_more = any(token in self.tokenizer.cut_texts for token in opening)
        marks = PromptMarks(conversation=conversation, opens_more=opens_more)
        if not has_states:
            return marks
        users = [at for at, message in enumerate(messages) if message.role is MessageRole.USER]
        if not users:
            return marks

        def before(message: int) -> int:
            """Count the tokens before the text of a user's message, its opening included."""
            other = render([*messages[:message], _OTHER])
            return _tokens(plan, common_prefix(other, plan.text))

        # A later turn's prompt: the template may drop earlier thoughts, or move the head.
        later = render([*messages, _ANSWER, _OTHER])
        marks = marks.with_branch(_tokens(plan, common_prefix(later, plan.text)))
        marks = replace(marks, trims_answers=bool(later) and _UNTRIMMED.encode() not in later)
        question = head = 0
        if users[-1] < len(messages) - 1:
            question = _tokens(plan, common_prefix(render(messages[: users[-1] + 1]), plan.text))
        elif len(users) > 1:  # the client may send another question instead
            marks = marks.with_branch(before(users[-1]))
        if len(plan.ids) > BLOCK_TOKENS and (users[0] or request.tools):
            head = before(users[0])
            shared = plan.text[: plan.ends[head - 1]].decode(errors="replace") if head else ""
            date = DATE_LINE.search(shared)
            if date is not None:
                size_bytes = len(shared[: date.start()].encode())
                marks = marks.with_branch(_tokens(plan, size_bytes))
        return replace(marks, head=head, question=question)

    def _conversation(self, messages: Sequence[Message], plan: PromptPlan, render: Render) -> int:
        """Count the tokens before the answer's opening, if that begins with a special token.

        Otherwise return 0: a text that ends there may continue in the middle of a message.
        """
        text = plan.text
        for opening in self._openings:
            if text.endswith(opening):
                return _tokens(plan, len(text) - len(opening))
        count = self._tokens_before_special(messages, plan, render)
        if count:
            known = {*self._openings, text[plan.ends[count - 1] :]}
            self._openings = tuple(sorted(known, key=len, reverse=True)[:ANSWER_OPENINGS_MAX])
        return count

    def _tokens_before_special(
        self, messages: Sequence[Message], plan: PromptPlan, render: Render
    ) -> int:
        """Count the tokens of these messages, if a special one follows them."""
        count = _tokens(plan, common_prefix(render(messages), plan.text))
        if not 0 < count < len(plan.ids) or plan.ids[count] not in self.tokenizer.cut_texts:
            return 0
        return count


def _tokens(plan: PromptPlan, size_bytes: int) -> int:
    """Count the tokens that lie within the first bytes of the text."""
    return bisect_right(plan.ends, size_bytes)
