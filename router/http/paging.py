"""Pages of lists: how many rows at most, and after which row they begin."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from router.http.refusals import refuse
from router.limits import PAGE_LIMIT_CHARS_MAX, PAGE_NAME_CHARS_MAX

T = TypeVar("T")
LIMIT: Final = "limit"
AFTER: Final = "after"


@dataclass(frozen=True, slots=True)
class ListPage:
    """Part of a list that a client requests."""

    limit: int
    after: str | None = None  # name of the row before the first one; None: from the beginning

    def cut(self, items: Sequence[T], name: Callable[[T], str]) -> tuple[Sequence[T], bool]:
        """Return the page of `items`, which are sorted by their names, and whether more follow."""
        after = self.after
        rest = items if after is None else [item for item in items if name(item) > after]
        return rest[: self.limit], len(rest) > self.limit


def page_of(query: Mapping[str, str], most: int, usual: int | None = None) -> ListPage:
    """Return the page of a query, of `most` rows at most and by default of `usual`."""
    after = query.get(AFTER)
    if after is not None and not 0 < len(after) <= PAGE_NAME_CHARS_MAX:
        refuse(AFTER, "expected the `last_id` of the previous page")
    return ListPage(limit_of(query, most, usual), after)


def limit_of(query: Mapping[str, str], most: int, usual: int | None = None) -> int:
    """Return the limit of a query, by default `usual`; raise RejectedError unless it is valid."""
    text = query.get(LIMIT)
    if text is None:
        return usual or most
    is_number = text.isascii() and text.isdigit() and len(text) <= PAGE_LIMIT_CHARS_MAX
    if not is_number or not 1 <= int(text) <= most:
        refuse(LIMIT, f"expected a whole number from 1 to {most}")
    return int(text)


def page_response(rows: Sequence[Any], last_id: str | None, *, has_more: bool) -> dict[str, Any]:
    """Return a page as JSON: `last_id` is what the next one begins `after`."""
    return {"object": "list", "data": rows, "has_more": has_more, "last_id": last_id}
