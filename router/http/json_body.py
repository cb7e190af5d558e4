"""The JSON object in a request's body, bounded and free of invalid text."""

from codecs import getincrementaldecoder
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.json_items import ItemCount
from fabric.limits import JSON_ITEMS_MAX
from router.http.auth import owner_of
from router.http.refusals import kind_of
from router.http.schema import Mapped, ObjectOf
from router.large_work import run_sized

T = TypeVar("T")


async def read_parsed(request: Request, parse: Callable[[dict[str, Any]], T]) -> T:
    """Parse the JSON object in the body with `parse`; raise RejectedError if it is invalid."""
    texts, size_bytes = await _read(request)
    return await run_sized(owner_of(request.scope), size_bytes, partial(_parse_texts, texts, parse))


async def read_body(
    request: Request, kind: ObjectOf[Any] | Mapped, *, may_be_absent: bool = False
) -> Any:
    """Parse the body as `kind`; with `may_be_absent`, an empty body counts as {}."""
    texts, size_bytes = await _read(request)
    if may_be_absent and not size_bytes:
        return kind.read({})
    return await run_sized(
        owner_of(request.scope), size_bytes, partial(_parse_texts, texts, kind.read)
    )


async def _read(request: Request) -> tuple[list[str], int]:
    """Collect the body; refuse invalid text and too many values as they arrive."""
    texts: list[str] = []
    size_bytes, count = 0, ItemCount(JSON_ITEMS_MAX)
    decoder = getincrementaldecoder("utf-8")()
    try:
        async for part in request.stream():
            count.feed(part)
            held_bytes = len(decoder.getstate()[0])
            texts.append(decoder.decode(part))
            size_bytes += len(part)
        held_bytes = len(decoder.getstate()[0])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        at = size_bytes - held_bytes + error.start
        message = f"the body is not valid UTF-8 at byte {at}"
        raise RejectedError(message, code="invalid_json") from None
    return texts, size_bytes


def _parse_texts(texts: list[str], parse: Callable[[dict[str, Any]], T]) -> T:
    return parse(_object(texts))


def _object(texts: list[str]) -> dict[str, Any]:
    """Return the object; the parts are freed first, so that only it and the text are held."""
    text = "".join(texts)
    texts.clear()
    body = parse_json(text, items_max=len(text))  # they were counted as they arrived
    if not isinstance(body, dict):
        message = f"the body must be a JSON object, not {kind_of(body)}"
        raise RejectedError(message, code="invalid_json")
    # Only an escape can hold half a surrogate pair, which no tokenizer accepts.
    if "\\ud" in text or "\\uD" in text:
        _refuse_surrogates(body)
    return body


def _refuse_surrogates(value: Any) -> None:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            _refuse_surrogate(item)
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _refuse_surrogate(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        message = "the body contains half of a surrogate pair, which is not text"
        raise RejectedError(message, code="invalid_json") from None
