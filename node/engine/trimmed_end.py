"""Keep the recurrent state of where an answer ends but for the white space behind it.

Many templates take that space from an answer, and all write a call's end in their own way. The next
prompt then leaves the record in front of it, where a state that cannot be cut would be missing.
"""

from dataclasses import dataclass

from node.mlx.resident_cache import CacheMark


@dataclass(slots=True, eq=False)
class TrimmedEnd:
    """Follows one answer; `always`: templates trim its text, too, and not only what calls."""

    always: bool
    behind_tokens: int  # a state up to here is not worth its memory: another one is near
    _mark: CacheMark | None = None

    def follow(self, text: str, before: CacheMark | None) -> None:
        """Take the next token's text, and what the cache was in front of it."""
        if text.strip() and not text[-1].isspace():
            self._mark = None
        elif text.strip() or self._mark is None:
            self._mark = before

    def mark(self, *, has_calls: bool) -> CacheMark | None:
        """Return what the cache was in front of the last white space, if it is worth keeping."""
        mark = self._mark if self.always or has_calls else None
        return mark if mark is not None and mark.tokens_count > self.behind_tokens else None
