"""Budget of an answer's thoughts: once it is spent, the answer is steered out of its thought.

The end of a thought is forced token by token, as the model's template writes it, and fed to the
model like sampled tokens. Only the tokens so far decide: a node that continues another node's
answer steers it in the same way, even in the middle of a thought's end.
"""

from collections import deque
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Final

from fabric.errors import RejectedError
from fabric.settings import EFFORT_OPTION, UNLIMITED, NodeSettings
from fabric.turn.generation import GenerateRequest, ThoughtLimit
from node.dialect.formats import ThoughtFormat, ThoughtStage
from node.limits import CUT_CHARACTER_TOKENS_MAX
from node.mlx.answer import Answer
from node.mlx.chat_tokenizer import ChatTokenizer

NO_EFFORT: Final = "none"
_THOUGHT, _ANSWER = "thought-5e0c1d", "answer-5e0c1d"  # texts that no template writes by itself
_THINKING: Final = {ThoughtStage.THOUGHT, ThoughtStage.CALL}
_QUESTION: Final = {"role": "user", "content": "x"}


@dataclass(frozen=True, slots=True)
class Steering:
    """Tokens that the next one must be among, or with `bars` must not."""

    ids: frozenset[int]
    bars: bool = False


@dataclass(frozen=True)
class ThoughtEndings:
    """Tokens with which a model's family ends a thought."""

    tokenizer: ChatTokenizer

    def close(self, thought: str) -> tuple[int, ...]:
        """Return the tokens that end a thought whose text so far is `thought`."""
        format_ = self.tokenizer.format
        if format_.messages is not None:
            return self._encode_after(format_.messages.thought_end)
        assert format_.thought is not None, "only models with marks think"
        opening, before, after = self.spacing
        ending = opening + before
        if not thought.strip() and ending.startswith(thought):
            gap = ending[len(thought) :]
        else:
            gap = _missing(before, thought)
        mark = format_.thought.end
        text = gap + mark + after
        ids = self._encode_after(text, mark)
        # Some tokenizers drop white space beside special tokens.
        return ids if self.tokenizer.decode(ids) == text else self._encode_after(mark)

    @cached_property
    def start_ids(self) -> frozenset[int]:
        """The special token that begins a thought, if there is one."""
        thought = self.tokenizer.format.thought
        first = self._encode_after(thought.start)[:1] if thought is not None else ()
        return frozenset(first) & self.tokenizer.special_texts.keys()

    @cached_property
    def other_parts(self) -> tuple[tuple[int, ...], ...]:
        """Tokens that begin other parts than a thought: first a text, then calls."""
        messages = self.tokenizer.format.messages
        texts = messages.other_parts if messages is not None else ()
        return tuple(self._encode_after(text) for text in texts)

    @cached_property
    def spacing(self) -> tuple[str, str, str]:
        """White space after a thought's start, before its end and after its end."""
        thought = self.tokenizer.format.thought
        assert thought is not None, "only models with marks think"
        return self._template_spacing(thought) or thought.spacing

    def _template_spacing(self, thought: ThoughtFormat) -> tuple[str, str, str] | None:
        """Read the white space from a rendered thought; None if the template leaves it out."""
        answer = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
        try:
            text = self.tokenizer.render([_QUESTION, answer], None, {}, opens_answer=False)
        except RejectedError:
            return None
        head, _, tail = text.partition(_THOUGHT)
        _, has_start, opening = head.rpartition(thought.start)
        before, has_end, rest = tail.partition(thought.end)
        is_whole = has_start and has_end and _ANSWER in rest
        if not is_whole or opening.strip() or before.strip():
            return None
        return opening, before, rest[: len(rest) - len(rest.lstrip())]

    def _encode_after(self, text: str, before: str = "") -> tuple[int, ...]:
        """Encode text as it is after `before`, where it may have fewer tokens than at a start."""
        ids = self.tokenizer.encode(text).ids
        if before:
            outer, inner = self.tokenizer.encode(before).ids, self.tokenizer.encode(before + text)
            if inner.ids[: len(outer)] == outer:
                ids = inner.ids[len(outer) :]
        return tuple(ids)


def _missing(space: str, text: str) -> str:
    """Return the end of `space` that `text` does not end with yet."""
    present_chars = next(size for size in range(len(space), -1, -1) if text.endswith(space[:size]))
    return space[present_chars:]


class ThoughtBudget:
    """Budget of one answer; used by one thread at a time."""

    def __init__(
        self,
        answer: Answer,
        begun: str,
        endings: ThoughtEndings,
        tokens_max: int,
        *,
        may_call: bool = False,
    ) -> None:
        """Track the answer in `answer`; `begun` is the part of it that the prompt contains."""
        self._answer = answer
        self._begun = begun
        self._endings = endings
        self._left = tokens_max
        self._may_call = may_call
        self._has_thought = answer.reader.stage in _THINKING
        self._recent: deque[int] = deque(maxlen=CUT_CHARACTER_TOKENS_MAX)
        self._waited_count = 0  # tokens for which a character has been incomplete
        self._ways: tuple[tuple[int, ...], ...] = ()  # alternative sequences of the next tokens
        self._choose_ways()

    @property
    def steering(self) -> Steering | None:
        """Constraint on the next token; None if it is free."""
        if self._ways:
            return Steering(frozenset(way[0] for way in self._ways))
        # A model that may think again would never answer.
        is_over = self._left <= 0 and self._has_thought
        if is_over and self._answer.reader.stage is ThoughtStage.OPEN and self._endings.start_ids:
            return Steering(self._endings.start_ids, bars=True)
        return None

    def take(self, token: int) -> None:
        """Consume the answer's next token."""
        before = self._answer.reader.stage
        self._answer.push(token)
        self._recent.append(token)
        if self._answer.reader.stage in _THINKING:
            self._has_thought = True
            self._left -= 1 if before in _THINKING else 0
        followed = (way[1:] for way in self._ways if way[0] == token)
        self._ways = tuple(way for way in followed if way)
        if not self._ways:
            self._choose_ways()

    def _choose_ways(self) -> None:
        if self._left > 0:
            return
        if self._answer.reader.stage is ThoughtStage.OPEN:
            parts = self._endings.other_parts
            self._ways = parts if self._may_call else parts[:1]
        elif self._answer.reader.stage is ThoughtStage.THOUGHT and not self._waits_for_character():
            self._ways = (self._endings.close(self._thought),)

    def _waits_for_character(self) -> bool:
        """Return whether the last character is incomplete; its bytes may span a few tokens."""
        text = self._endings.tokenizer.decode(list(self._recent))
        is_cut = text.endswith("\ufffd") and self._waited_count < CUT_CHARACTER_TOKENS_MAX - 1
        self._waited_count = self._waited_count + 1 if is_cut else 0
        return is_cut

    @property
    def _thought(self) -> str:
        """Text of the current thought."""
        thought = self._endings.tokenizer.format.thought
        text = self._begun + self._answer.text
        return text.rpartition(thought.start)[2] if thought is not None else text


@dataclass(frozen=True)
class ThoughtBudgets:
    """Budgets of a node's answers, by their requests and by the settings."""

    tokenizer: ChatTokenizer
    settings: NodeSettings
    _endings: ThoughtEndings = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_endings", ThoughtEndings(self.tokenizer))

    def tokens_max(self, limit: ThoughtLimit | None) -> int | None:
        """Return the tokens of thought that a request may have; None: any number."""
        tokens = self.settings.thinking_budget
        if limit is not None and limit.tokens is not None:
            tokens = limit.tokens
        elif limit is not None and limit.effort == NO_EFFORT:
            tokens = 0
        elif limit is not None and not self._reads_effort:
            tokens = asdict(self.settings.effort_budgets).get(limit.effort or "", tokens)
        return None if tokens == UNLIMITED else tokens

    @cached_property
    def _reads_effort(self) -> bool:
        """Whether the template passes efforts on, so that the model itself obeys them."""
        return EFFORT_OPTION in self.tokenizer.template.source

    def applies(self, request: GenerateRequest) -> bool:
        """Return whether a request's answer has a budget."""
        tokens = self.tokens_max(request.sampling.thoughts)
        if tokens is None or tokens >= request.sampling.max_tokens:
            return False
        format_, is_chat = self.tokenizer.format, request.messages is not None or request.extends
        return is_chat and (format_.thought is not None or format_.messages is not None)

    def begin(self, request: GenerateRequest, begun: str, answer: Answer) -> ThoughtBudget:
        """Return the budget of an answer, after its part in the prompt and other nodes' tokens."""
        tokens = self.tokens_max(request.sampling.thoughts)
        assert tokens is not None, "only some answers have a budget"
        may_call = bool(request.tools) and request.reads_calls
        budget = ThoughtBudget(answer, begun, self._endings, tokens, may_call=may_call)
        for token in request.resume.answer_ids if request.resume is not None else ():
            budget.take(token)
        return budget
