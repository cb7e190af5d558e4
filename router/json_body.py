"""The JSON object in a request's body, checked for what no later code should meet."""

from typing import Any

from starlette.requests import Request

from fabric.codec import parse_json
from fabric.errors import RejectedError
from router.fields import kind_of


async def read_object(request: Request) -> dict[str, Any]:
    """Return the body's object; raise RejectedError for anything else."""
    raw = await request.body()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"the body is not valid UTF-8 at byte {error.start}"
        raise RejectedError(message, code="invalid_json") from None
    body = parse_json(text)
    if not isinstance(body, dict):
        message = f"the body must be a JSON object, not {kind_of(body)}"
        raise RejectedError(message, code="invalid_json")
    # Only an escape can bring in half a surrogate pair, which no tokenizer takes.
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
