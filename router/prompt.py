"""Prompt of a turn, with its size and sketch, by which the router places it."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xxhash import xxh3_64

from fabric.limits import SKETCH_PIECE_BYTES
from fabric.turn.answer_constraints import ANY_CALLS, CallChoice
from fabric.turn.conversation_form import form_chain
from fabric.turn.messages import Message, MessageRole
from fabric.turn.sketch import canonical_chunks, sketch_chunks, sketch_ends, sketch_text

# An estimate; all nodes run the same tokenizer, so it scales all costs equally.
BYTES_PER_TOKEN = 4.0
_OPENING_BYTES = 64


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt as messages, raw text or tokens; exactly one of them is set."""

    messages: tuple[Message, ...] | None = field(default=None, repr=False)
    text: str | None = field(default=None, repr=False)
    tools: list[Any] | None = field(default=None, repr=False)
    template_options: dict[str, Any] = field(default_factory=dict, repr=False)
    reads_calls: bool = True  # False: the model sees the tools, but its calls are not parsed
    calls: CallChoice = ANY_CALLS
    sketch: tuple[int, ...] = field(default=(), repr=False)
    sketch_ends: tuple[int, ...] = field(default=(), repr=False)  # byte at which each piece ends
    opening: int = 0  # constant while a conversation grows
    form: int | None = None  # of its messages, without what clients rewrite
    forms: tuple[int, ...] = field(default=(), repr=False)  # of its beginnings, the longest first
    bytes_count: int = 0
    extends: bool = False  # the text extends the agent's memory
    plain_marks: tuple[int, ...] | None = field(default=None, repr=False)  # as its node found them
    ids: tuple[int, ...] | None = field(default=None, repr=False)
    continues: bool = False  # the last message is a started answer, to be continued
    echo: bool = False  # it is returned before its answer, and not kept

    def share(self, pieces_count: int) -> float:
        """Return the share of the prompt's bytes in the first pieces of its sketch."""
        if not pieces_count or not self.bytes_count:
            return 0.0
        return min(1.0, self.sketch_ends[pieces_count - 1] / self.bytes_count)

    @property
    def tokens_estimate(self) -> int:
        """Estimated number of tokens, without a tokenizer."""
        return max(1, round(self.bytes_count / BYTES_PER_TOKEN))

    def with_messages(self, messages: Sequence[Message]) -> "Prompt":
        """Return the prompt with other messages."""
        prompt = chat_prompt(messages, self.tools, self.template_options, continues=self.continues)
        return replace(prompt, reads_calls=self.reads_calls, calls=self.calls)


def chat_prompt(
    messages: Sequence[Message],
    tools: list[Any] | None = None,
    template_options: Mapping[str, Any] | None = None,
    *,
    continues: bool = False,
) -> Prompt:
    """Return the prompt of a chat; its opening ends with the first user message.

    The sketch excludes a started answer, which the next turn extends.
    """
    chunks = list(canonical_chunks(messages, tools))
    complete = chunks[:-1] if continues else chunks
    forms = form_chain(messages[:-1] if continues else messages, tools)
    return Prompt(
        messages=tuple(messages),
        tools=tools,
        template_options=dict(template_options or {}),
        continues=continues,
        sketch=sketch_chunks(complete),
        form=forms.whole.digest,
        forms=tuple(forms.turns()),
        sketch_ends=sketch_ends(map(len, complete)),
        opening=xxh3_64(b"".join(_opening(chunks, messages))).intdigest(),
        bytes_count=sum(map(len, chunks)),
    )


def raw_prompt(text: str) -> Prompt:
    """Return the prompt of a raw completion."""
    raw = text.encode("utf-8", "surrogatepass")
    opening = xxh3_64(raw[:_OPENING_BYTES]).intdigest()
    sketch, ends = sketch_text(raw), _ends_of_text(raw)
    return Prompt(text=text, sketch=sketch, sketch_ends=ends, opening=opening, bytes_count=len(raw))


def tokens_prompt(ids: Sequence[int]) -> Prompt:
    """Return a prompt of token ids."""
    raw = array("I", ids).tobytes()
    opening = xxh3_64(raw[:_OPENING_BYTES]).intdigest()
    bytes_count = round(len(ids) * BYTES_PER_TOKEN)
    sketch, ends = sketch_text(raw), _ends_of_text(raw)
    return Prompt(
        ids=tuple(ids),
        sketch=sketch,
        sketch_ends=ends,
        opening=opening,
        bytes_count=bytes_count,
    )


def _ends_of_text(raw: bytes) -> tuple[int, ...]:
    return sketch_ends([len(raw) - len(raw) % SKETCH_PIECE_BYTES])


def _opening(chunks: Sequence[bytes], messages: Sequence[Message]) -> Sequence[bytes]:
    tools_count = len(chunks) - len(messages)  # chunks of tools, if there are any
    for index, message in enumerate(messages):
        if message.role is MessageRole.USER:
            return chunks[: tools_count + index + 1]
    return chunks
