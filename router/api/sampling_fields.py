"""Sampling fields that every dialect has, and where an answer stops."""

from dataclasses import dataclass
from typing import Any, Final

from router.http.refusals import refuse, require_text
from router.http.schema import AnyValue, ArrayOf, Integer, Number, Schema, Text, either
from router.limits import STOP_STRING_CHARS_MAX, STOP_STRINGS_MAX

SEED: Final = Integer(-(1 << 63), (1 << 64) - 1)
_TOP_P_MIN: Final = 1e-6
_STRINGS: Final = ArrayOf(Text(STOP_STRING_CHARS_MAX, 1), STOP_STRINGS_MAX)
_ANY_STRINGS: Final = ArrayOf(AnyValue(), STOP_STRINGS_MAX)


@dataclass(frozen=True, slots=True)
class TopP(Number):
    """Probability mass to sample from; 0 keeps the most probable token."""

    low: float = 0.0
    high: float = 1.0

    def read(self, value: Any, param: str) -> float:
        return max(_TOP_P_MIN, Number.read(self, value, param))


@dataclass(frozen=True, slots=True)
class StopTexts:
    """Strings that end an answer."""

    takes_text: bool = False  # OpenAI's form: also one string, and empty ones are ignored

    def read(self, value: Any, param: str) -> tuple[str, ...]:
        if self.takes_text:
            value = [value] if isinstance(value, str) else value
        items = _ANY_STRINGS.read(value, param)
        texts = tuple(require_text(item, param) for item in items if not self._is_unset(item))
        if not all(1 <= len(text) <= STOP_STRING_CHARS_MAX for text in texts):
            refuse(param, f"each must have between 1 and {STOP_STRING_CHARS_MAX} characters")
        return texts

    def _is_unset(self, item: Any) -> bool:
        return self.takes_text and item == ""

    def schema(self) -> Schema:
        if not self.takes_text:
            return _STRINGS.schema()
        text = Text(STOP_STRING_CHARS_MAX)
        return either(text.schema(), ArrayOf(text, STOP_STRINGS_MAX).schema())
