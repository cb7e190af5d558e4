"""Conversion between messages, text and tokens: rendering, encoding with offsets, cuts.

A prompt is only ever cut where a special token begins: tokenizers split there before any
merging, so tokens before the cut plus a fresh encoding after it equal a fresh encoding of
the whole. That is provable for special tokens and false almost everywhere else.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from mlx_lm.tokenizer_utils import TokenizerWrapper

from fabric.errors import FatalError, RejectedError
from fabric.settings import (
    BUDGET_OPTION,
    EFFORT_OPTION,
    MARKS_OPTION,
    THINKING_SWITCH,
    THINKING_SWITCHES,
    NodeSettings,
)
from fabric.turn.answer_constraints import ANY_CALLS, CallChoice
from fabric.turn.control_marks import ControlMarks
from fabric.turn.prompt_plan import Encoded, PromptLimit
from node.dialect.call_grammar import GrammarOptions
from node.dialect.folding import Rendered, render_folded
from node.dialect.format_selection import (
    AUTO,
    CALL_FORMATS,
    FormatSettings,
    has_own_sign,
    select_format,
)
from node.dialect.formats import AnswerFormat, AnswerReader
from node.dialect.marked_reader import MarkedReader
from node.dialect.plain_marks import PlainMarks
from node.dialect.template_messages import Messages, adapt_messages, cut_at_mark, mark_end
from node.dialect.tool_schema import ToolSpec, template_tools
from node.grammar.expression import Expression
from node.grammar.thought import ThoughtMarks
from node.mlx.chat_template import ChatTemplate
from node.mlx.format_trial import CALLS, THOUGHTS, FormatTrial
from node.mlx.plain_encoder import AFTER, BEFORE, BRACKETS, PlainEncoder, control_ids
from node.mlx.token_text import TextPieces, char_places, token_reach_bytes
from node.mlx.upstream_formats import upstream_formats

_PARSERS: Final = {CALLS: "node.tool_parser", THOUGHTS: "node.reasoning_parser"}
_SLICE_CHARS: Final = 1 << 14  # each is encoded in a few milliseconds, and then forgotten
_SLICED_TOKENS_SHARE: Final = 1.25  # slices have fewer than this times the whole's tokens


def format_settings(settings: NodeSettings) -> FormatSettings:
    """Read the operator's options for the model; raise FatalError if a template cannot be read."""
    template = ""
    if settings.chat_template:
        try:
            template = Path(settings.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"node.chat_template cannot be read ({type(error).__name__})"
            raise FatalError(message, code="invalid_settings") from None
    return FormatSettings(
        calls=settings.tool_parser,
        thoughts=settings.reasoning_parser,
        template=template,
        options=settings.template_options,
        is_strict=settings.strict_template,
    )


class ChatTokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, wrapper: TokenizerWrapper, chosen: FormatSettings | None = None) -> None:
        """Read answers in the operator's format, or in the template's."""
        self.wrapper = wrapper
        self._chosen = chosen = chosen or FormatSettings()
        self.template = ChatTemplate(wrapper, chosen.template)
        self._tokenizer = wrapper._tokenizer  # noqa: SLF001 - offsets are not public
        if not getattr(self._tokenizer, "is_fast", False):
            message = "the tokenizer gives no offsets: a tokenizer.json is needed"
            raise FatalError(message, code="unsupported_model")
        self.reach_bytes = token_reach_bytes(self._tokenizer)
        self.format = select_format(
            self.template.source, self._tokenizer.get_vocab(), chosen, upstream_formats(wrapper)
        )
        self.unread_parts = self._unread_parts(chosen)
        if CALLS in self.unread_parts:
            self.format = replace(self.format, calls=None)
        if THOUGHTS in self.unread_parts:
            self.format = replace(self.format, thought=None)
        added, answers = self._tokenizer.added_tokens_decoder, self._answer_marks()
        self.control_marks = ControlMarks(control_ids(added, self.template.source, answers))
        self._plain_marks = PlainMarks(self.control_marks.ids, answers)
        self._plain_encoder = PlainEncoder(self._tokenizer, self.control_marks.ids)

    def _answer_marks(self) -> frozenset[str]:
        """Return the marks of thoughts and calls in answers."""
        thought, calls = self.format.thought, self.format.calls
        marks = {thought.start, thought.end} if thought is not None else set()
        marks |= {*calls.starts, calls.end} if calls is not None else set()
        ends = {self.special_texts.get(index, "") for index in self.eos_ids}
        return frozenset(marks - ends - {""})

    def _unread_parts(self, chosen: FormatSettings) -> tuple[str, ...]:
        """Name the parts of answers that the template writes in no format known here.

        An operator's choice is not tried, nor is a format that the template certainly has.
        """
        texts, format_ = self.special_texts, self.format
        ends = [texts[index] for index in self.eos_ids if index in texts]
        unread = FormatTrial(self.template, format_, ends).unread()
        calls, source = format_.calls, self.template.source
        is_known = {
            CALLS: chosen.calls != AUTO
            or has_own_sign(source, calls)
            or (calls is not None and calls.name not in CALL_FORMATS),
            THOUGHTS: chosen.thoughts != AUTO or has_own_sign(source, format_.thought),
        }
        return tuple(part for part in unread if not is_known[part])

    @property
    def warning(self) -> str | None:
        """Warning about parts of the template or tokenizer that are not supported, or None."""
        if not self.unread_parts:
            return self._plain_encoder.problem
        parts = " and ".join(self.unread_parts)
        settings = " and ".join(_PARSERS[part] for part in self.unread_parts)
        return (
            f"the chat template writes {parts} in a format that is not known here, so answers "
            f"show them as text: set {settings} if the format has another name"
        )

    @property
    def default_options(self) -> dict[str, Any]:
        """The operator's default options."""
        return self._chosen.options

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer: named by the model's files, or written by its template."""
        named = frozenset(self.wrapper.eos_token_ids)
        end = self._turn_end_id
        return named if end is None else named | {end}

    @property
    def _turn_end_id(self) -> int | None:
        """Return the last special token that the template writes after an answer, if any.

        An answer of several messages, each with a header of its own, has several such ends.
        """
        template, thought, texts = self.template, self.format.thought, self.special_texts
        if self.format.messages is not None or not template.exists:
            return None
        thinking = {thought.start, thought.end} if thought else set()
        opening = {texts[t] for t in self.encode(template.answer_opening).ids if t in texts}
        ends = [t for t in self.encode(template.turn_end).ids if texts.get(t, "").strip()]
        if opening - thinking or not ends or template.is_within_answers(texts[ends[-1]]):
            return None
        return ends[-1]

    @cached_property
    def cut_texts(self) -> dict[int, bytes]:
        """Special tokens that always stand alone, with their text: a prompt may be cut at them.

        Each is tried: tokenizers may recognize one at the start of a text but not within it. White
        space merges with the text before it; text that a token swallows after it does no harm.
        """
        added = self._tokenizer.added_tokens_decoder
        texts = [token.content for token in added.values()]
        before = self.encode(BEFORE).ids
        return {
            index: token.content.encode()
            for index, token in added.items()
            if not (token.lstrip or token.single_word or token.content.isspace())
            and not any(t != token.content and t.startswith(token.content) for t in texts)
            and self._stands_alone(index, token.content, before)
        }

    def _stands_alone(self, index: int, text: str, before: list[int]) -> bool:
        after = self.encode(text + AFTER).ids
        whole = self.encode(BEFORE + text + AFTER).ids
        return after[:1] == [index] and whole == before + after

    @cached_property
    def special_texts(self) -> dict[int, str]:
        """Texts of all special tokens, also of those that strip adjacent text."""
        return {i: token.content for i, token in self._tokenizer.added_tokens_decoder.items()}

    def reader(
        self,
        begun: str,
        stop: tuple[str, ...],
        tools: list[Any] | None,
        call_seed: str,
        choice: CallChoice = ANY_CALLS,
    ) -> AnswerReader:
        """Return the reader of an answer whose beginning, `begun`, the prompt contains."""
        reader: AnswerReader
        if self.format.messages is not None:
            reader = self.format.messages.make_reader(stop, tools, call_seed, choice)
        else:
            reader = MarkedReader(self.format, stop, tools, call_seed, choice)
        reader.begin(begun)
        return reader

    def call_grammar(self, tools: Sequence[ToolSpec], choice: CallChoice) -> Expression:
        """Return the grammar of calls, or in a format with headers of the whole answer.

        Raise RejectedError if there is none for this model's format.
        """
        grammar = self.format.grammar
        if grammar is None:
            message = (
                "this model's tool-call format is unknown, so calls cannot be enforced: set "
                "tool_choice to 'auto', without strict tools"
            )
            raise RejectedError(message, code="unsupported_parameter", param="tool_choice")
        texts = self.special_texts
        ends = frozenset(texts[index] for index in self.eos_ids if index in texts)
        marks = frozenset(texts.values())
        options = GrammarOptions(
            self.template.source, marks, ends, choice.takes_one, choice.must_call
        )
        return grammar(tools, options)

    def plain_reader(self, stop: tuple[str, ...]) -> AnswerReader:
        """Return the reader of plain text."""
        return MarkedReader(AnswerFormat(), stop, None, "")

    def render(
        self,
        messages: list[Any],
        tools: list[Any] | None,
        options: dict[str, Any],
        *,
        opens_answer: bool = True,
    ) -> str:
        """Render a conversation up to the answer; raise RejectedError if it is refused."""
        return self.rendered(messages, tools, options, opens_answer=opens_answer).text

    def rendered(
        self,
        messages: list[Any],
        tools: list[Any] | None,
        options: dict[str, Any],
        *,
        opens_answer: bool = True,
        continues: bool = False,
    ) -> Rendered:
        """Render, and return the messages folded for a template that refuses or drops one.

        With `continues`, the text ends where the last message's does, which is an answer's.
        """
        shown, opens_answer = template_tools(tools), opens_answer and not continues
        takes_marks = {**self.default_options, **options}.get(MARKS_OPTION) is True
        disarms = self.template.exists and not takes_marks and self._plain_encoder.problem is None
        if disarms:
            marks = self._plain_marks
            messages, shown, options = (
                marks.messages(messages),
                marks.value(shown),
                marks.value(options),
            )
        options = self._options(options)

        def attempt(tried: Messages) -> str:
            text = self.template.render(tried, shown, options, opens_answer=opens_answer)
            return cut_at_mark(text) if continues else text

        adapted = adapt_messages(
            mark_end(messages) if continues else messages, self.template.traits
        )
        rendered = render_folded(
            adapted, attempt, self.template.traits, is_strict=self._chosen.is_strict
        )
        if (opens_answer or continues) and self.template.exists:
            messages, thoughts = list(rendered.messages), self._thought_texts
            start = self.template.answer_start(
                rendered.text, messages, shown, options, thoughts, continues=continues
            )
            rendered = replace(rendered, begun=rendered.text[start:])
        if not disarms:
            return rendered
        restored, begun = self._plain_marks.restored(rendered.text), rendered.begun
        begun = self._plain_marks.restored(begun).text
        return replace(rendered, text=restored.text, plain=restored.plain, begun=begun)

    def begun_at_end(self, prompt: str) -> str:
        """Return the beginning of an answer that ends a prompt of text."""
        return self.template.begun_at_end(prompt, self._thought_texts)

    @property
    def _thought_texts(self) -> tuple[str, ...]:
        thought = self.format.thought
        known = (thought.start, thought.end) if thought is not None else ()
        return tuple(dict.fromkeys((*known, "</think>")))

    def _options(self, requested: dict[str, Any]) -> dict[str, Any]:
        """Merge the request's options with the operator's."""
        options = {**self._chosen.options, **requested}
        options.pop(MARKS_OPTION, None)
        effort = options.get(EFFORT_OPTION)
        messages = self.format.messages
        if messages is not None and effort in messages.efforts:
            options[EFFORT_OPTION] = messages.efforts[str(effort)]
        elif effort == "none":
            options = {**dict.fromkeys(THINKING_SWITCHES, False), **options}
        elif effort is not None or requested.get(
            BUDGET_OPTION
        ):  # a limit on thoughts implies thoughts
            options = {THINKING_SWITCH: True, **options}
        return options

    def encode(
        self,
        text: str,
        *,
        special_prefix: bool = False,
        limit: PromptLimit | None = None,
        plain: Sequence[int] = (),
    ) -> Encoded:
        """Encode text; `special_prefix` adds the tokenizer's prefix of raw prompts.

        At the bytes `plain` begin control marks that are plain text; raw prompts have none. Raises
        RejectedError as soon as it is known to reach `limit`.
        """
        if special_prefix:
            ids, ends = self._encode_piece(text, limit, 0, special_prefix=True)
        else:
            ids, ends = self._encode_pieces(text, limit, char_places(text, plain))
        if limit is not None:
            limit.check(len(ids))
        return Encoded(ids, _byte_ends(text, ends))

    def _encode_pieces(
        self, text: str, limit: PromptLimit | None, plain: list[int]
    ) -> tuple[list[int], list[int]]:
        if limit is None:
            return self._encode_part(text, None, 0, plain)
        ids: list[int] = []
        ends: list[int] = []
        start = 0
        for piece, first in self._pieces.cut(text, frozenset(plain)):
            limit.check(len(ids))
            low, high = (bisect_left(plain, at) for at in (start, start + len(piece)))
            piece_plain = [at - start for at in plain[low:high]]
            piece_ids, piece_ends = self._encode_part(piece, limit, len(ids), piece_plain)
            if first is not None and piece_ids[:1] != [first]:  # it splits special tokens, too
                return self._encode_part(text, limit, 0, plain)
            ids += piece_ids
            ends += [start + end for end in piece_ends]
            start += len(piece)
        return ids, ends

    def _encode_part(
        self, text: str, limit: PromptLimit | None, before: int, plain: list[int]
    ) -> tuple[list[int], list[int]]:
        """Encode a part of a text, with plain marks at these characters of it."""
        if plain:
            if limit is not None:
                self._check_roughly(text, limit, before)
            encoded = self._plain_encoder.encode(text, frozenset(plain))
            if encoded is not None:
                return encoded
        return self._encode_piece(text, limit, before)

    def _encode_piece(
        self,
        text: str,
        limit: PromptLimit | None,
        before: int,
        *,
        special_prefix: bool = False,
    ) -> tuple[list[int], list[int]]:
        """Return ids and ends in characters."""
        if limit is not None:
            self._check_roughly(text, limit, before)
        out = self._tokenizer(
            text,
            add_special_tokens=special_prefix,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return list(out["input_ids"]), [end for _, end in out["offset_mapping"]]

    def _check_roughly(self, text: str, limit: PromptLimit, before: int) -> None:
        """Raise RejectedError if a text that cannot be cut is far over the limit.

        Slices have more tokens than the whole: a cut token becomes several, and adjacent ones may
        merge differently. A text that passes is at most a little over the limit.
        """
        if len(text) <= _SLICE_CHARS or _utf8_bytes(text) <= limit.left(before):
            return  # each token has at least one byte
        count = 0
        for start in range(0, len(text), _SLICE_CHARS):
            limit.check(before)
            piece = text[start : start + _SLICE_CHARS]
            out = self._tokenizer(
                piece, add_special_tokens=False, return_attention_mask=False, verbose=False
            )
            count += len(out["input_ids"]) - self.token_bytes_max
            sure_count = int(count / _SLICED_TOKENS_SHARE)
            if sure_count >= limit.left(before):
                limit.check(before + sure_count)

    @property
    def definition(self) -> str:
        """Return the tokenizer's definition in the form of tokenizer.json, with added tokens."""
        return str(self._tokenizer.backend_tokenizer.to_str())

    @property
    def thought_marks(self) -> ThoughtMarks | None:
        """Return the marks around the model's thoughts, if it has any."""
        if self.format.messages is not None:
            return self.format.messages.thought_marks
        thought = self.format.thought
        if thought is None:
            return None
        return ThoughtMarks(thought.start, (thought.end,), self.added_ids.get(thought.start))

    @property
    def call_ids(self) -> frozenset[int]:
        """Tokens that begin a tool call by themselves."""
        starts = self.format.calls.starts if self.format.calls is not None else ()
        return frozenset(self.added_ids[text] for text in starts if text in self.added_ids)

    @cached_property
    def added_ids(self) -> dict[str, int]:
        """Special tokens by their text."""
        return {text: index for index, text in self.special_texts.items()}

    @cached_property
    def markup_ids(self) -> frozenset[int]:
        """Special tokens, and added ones that look like them, such as `<think>`."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset(i for i, token in added if token.special or token.content[:1] in BRACKETS)

    def token_text(self, token: int) -> str:
        """Decode one token alone, for log probability listings."""
        return self.decode([token])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, including special ones."""
        return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    @cached_property
    def token_bytes_max(self) -> int:
        """Upper bound of the bytes of a token's own text."""
        return max(len(text.encode("utf-8", "replace")) for text in self._tokenizer.get_vocab())

    @cached_property
    def _pieces(self) -> TextPieces:
        return TextPieces(self._tokenizer.added_tokens_decoder)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids that requests may name."""
        return len(self.wrapper)


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def _byte_ends(text: str, char_ends: list[int]) -> list[int]:
    """Convert character ends to ascending byte ends that reach the end."""
    if not text.isascii():
        sizes = [0, *accumulate(len(char.encode("utf-8")) for char in text)]
        char_ends = [sizes[end] for end in char_ends]
        total = sizes[-1]
    else:
        total = len(text)
    # Tokenizers may report trimmed or empty offsets: an end is at least all ends before it.
    ends = list(accumulate(char_ends, max))
    if ends:
        ends[-1] = total
    return ends
