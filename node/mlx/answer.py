"""Text of an answer in progress, read in the format of its model family.

Keeps the exact text and offsets of every token for the agent's record, whatever is shown.
"""

from copy import copy, deepcopy
from typing import Any

from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer

from fabric.turn.answer_constraints import ANY_CALLS, CallChoice
from node.dialect.answer_delta import AnswerDelta
from node.mlx.chat_tokenizer import ChatTokenizer


class Answer:
    """Text of one growing answer."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        begun: str,
        stop: tuple[str, ...],
        tools: list[Any] | None,
        *,
        is_chat: bool = True,
        call_seed: str = "",
        choice: CallChoice = ANY_CALLS,
    ) -> None:
        """Read calls of `tools`, with ids derived from the seed; do not read completions.

        `begun`: the beginning of the answer that its prompt contains.
        """
        self._eos_ids = tokenizer.eos_ids
        self._end_texts = tokenizer.special_texts
        self._detokenizer = tokenizer.wrapper.detokenizer
        # Detokenizers strip a leading space at the start of a text; an answer has a prompt
        # before it, and its exact text must extend that.
        if "text" in vars(self._detokenizer):
            self._detokenizer.text = "\n"
            self._detokenizer.offset = 1
        if is_chat:
            self.reader = tokenizer.reader(begun, stop, tools, call_seed, choice)
        else:
            self.reader = tokenizer.plain_reader(stop)
        self._shared = {id(tools): tools}
        self.text = ""
        self.ends: list[int] = []  # byte ends of tokens within this answer's text
        self._size_bytes = 0
        self._pending_count = 0

    def fork(self) -> "Answer":
        """Return a copy that continues independently."""
        twin = copy(self)
        twin.ends = list(self.ends)
        twin.reader = deepcopy(self.reader, dict(self._shared))
        twin._detokenizer = detokenizer = copy(self._detokenizer)  # noqa: SLF001 - of this class
        detokenizer.tokens = list(detokenizer.tokens)
        if isinstance(detokenizer, NaiveStreamingDetokenizer):
            detokenizer._current_tokens = list(detokenizer._current_tokens)  # noqa: SLF001
        return twin

    def push(self, token: int) -> AnswerDelta:
        self._detokenizer.add_token(token)
        self._pending_count += 1
        segment = self._take_segment()
        if token in self._eos_ids:
            segment = segment.removesuffix(self._end_texts.get(token, ""))
        return self.reader.feed(segment)

    def finish(self, *, stopped: bool, is_cut: bool = False) -> AnswerDelta:
        """Release held-back text; with `stopped`, drop text after the stop.

        `is_cut`: the model did not end the answer itself.
        """
        self._detokenizer.finalize()
        segment = self._take_segment()
        self.ends += [self._size_bytes] * self._pending_count
        self._pending_count = 0
        if stopped:
            return AnswerDelta()
        shown = self.reader.feed(segment)
        last = self.reader.finish(is_cut=is_cut)
        return AnswerDelta(
            text=shown.text + last.text,
            reasoning=shown.reasoning + last.reasoning,
            call_deltas=shown.call_deltas + last.call_deltas,
            calls=shown.calls + last.calls,
        )

    def _take_segment(self) -> str:
        segment = self._detokenizer.last_segment
        if segment:
            self.text += segment
            self._size_bytes += len(segment.encode("utf-8", "replace"))
            self.ends += [self._size_bytes] * self._pending_count
            self._pending_count = 0
        return str(segment)
