"""Between messages, text and tokens: render the template, encode with offsets, know cuts.

A prompt is only ever cut where a special token begins: tokenizers split there before any
merging, so tokens before the cut plus a fresh encoding after it equal a fresh encoding of
the whole. That is provable for special tokens and false almost everywhere else.
"""

from functools import cached_property
from itertools import accumulate
from typing import Any

from jinja2 import TemplateError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from fabric.errors import FatalError, RejectedError
from node.prompt_plan import Encoded


class ChatTokenizer:
    """A model's tokenizer and chat template."""

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self.wrapper = wrapper
        self._tokenizer = wrapper._tokenizer  # noqa: SLF001 - offsets are not offered otherwise
        if not getattr(self._tokenizer, "is_fast", False):
            message = "the tokenizer gives no offsets: a tokenizer.json is needed"
            raise FatalError(message, code="unsupported_model")

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self.wrapper.eos_token_ids)

    @cached_property
    def cut_texts(self) -> dict[int, bytes]:
        """Special tokens that always stand alone, with their text: the places to cut at."""
        added = self._tokenizer.added_tokens_decoder
        texts = [token.content for token in added.values()]
        return {
            index: token.content.encode()
            for index, token in added.items()
            if not (token.lstrip or token.rstrip or token.single_word)
            and not any(t != token.content and t.startswith(token.content) for t in texts)
        }

    def render(self, messages: list[Any], tools: list[Any] | None, options: dict[str, Any]) -> str:
        """Render a conversation up to where the model answers; RejectedError if refused."""
        if not self.wrapper.has_chat_template:
            return "\n".join(str(message.get("content") or "") for message in messages)
        try:
            text = self.wrapper.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True, **options
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # Only a template's own raise_exception text is known to hold no prompt text.
            detail = error.message if isinstance(error, TemplateError) else type(error).__name__
            message = f"the model's chat template does not accept these messages: {detail}"
            raise RejectedError(message, code="template_refused", param="messages") from None
        return str(text)

    def encode(self, text: str, *, special_prefix: bool = False) -> Encoded:
        """Encode text; `special_prefix` adds what the tokenizer puts before raw prompts."""
        out = self._tokenizer(
            text,
            add_special_tokens=special_prefix,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        ends = _byte_ends(text, [end for _, end in out["offset_mapping"]])
        return Encoded(list(out["input_ids"]), ends)

    def token_text(self, token: int) -> str:
        """Decode one token alone, for log probability listings."""
        return str(self._tokenizer.decode([token]))

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids that may be asked for."""
        return len(self.wrapper)


def _byte_ends(text: str, char_ends: list[int]) -> list[int]:
    """Turn character ends into byte ends that never go backwards and reach the end."""
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
