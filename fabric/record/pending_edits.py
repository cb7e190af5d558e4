"""Directives that an agent's own text does not reflect yet, and the text that they make."""

from collections.abc import Sequence

from fabric.record.directive import Directive, live, text_digest
from fabric.record.manifest import Manifest


def pending(record: Manifest) -> tuple[Directive, ...]:
    """Return the directives still to be applied to a record's own text, in order."""
    placed = [d for d in live(record.directives) if d.at is not None and not d.is_applied]
    if not placed:
        return ()
    text, done, pending_directives = record.text.encode("utf-8", "surrogatepass"), 0, []
    for directive in sorted(placed, key=lambda directive: directive.at or (0, 0)):
        start, end = directive.at or (0, 0)
        if start >= done and text_digest(text[start:end]) == directive.was:
            pending_directives.append(directive)
            done = end
    return tuple(pending_directives)


def edits_of(directives: Sequence[Directive]) -> list[tuple[int, int, int]]:
    """Return start, end and new size in bytes of what directives replace in a record's text."""
    return [
        (*directive.at, len((directive.replacement or "").encode("utf-8", "replace")))
        for directive in directives
        if directive.at is not None
    ]


def rewritten(record: Manifest) -> bytes:
    """Return an agent's text with its pending directives applied."""
    text = record.text.encode("utf-8", "surrogatepass")
    for directive in reversed(pending(record)):
        start, end = directive.at or (0, 0)
        spelled = (directive.replacement or "").encode("utf-8", "replace")
        text = text[:start] + spelled + text[end:]
    return text
