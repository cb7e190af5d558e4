"""Content that a text model cannot read: pictures, files, sound, and blocks of hosted tools.

Its readable parts become text, and a placeholder takes the place of the rest, so that a session
continues whatever its history contains. The text depends on the content alone: it has the same
bytes in every turn, and the prompt keeps its prefix.
"""

import json
from base64 import b64decode
from binascii import Error as BinasciiError
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from router.http.refusals import refuse, require_object, require_text
from router.http.schema import ArrayOf, Either, JsonKind, Mapped, Schema, Text, refuse_missing
from router.http.turn_headers import header_word
from router.limits import PLACEHOLDER_INPUT_CHARS_MAX, PLACEHOLDER_NAME_CHARS_MAX

_NOUNS: Final = {
    **dict.fromkeys(("image", "image_url", "input_image", "output_image", "image_file"), "image"),
    **dict.fromkeys(("computer_screenshot", "screenshot"), "image"),
    **dict.fromkeys(("audio", "input_audio", "output_audio", "audio_url"), "audio"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("file", "input_file", "container_upload"), "file"),
    "document": "document",
    "image_generation_call": "image",
}
_THOUGHTS: Final = ("thinking", "redacted_thinking", "reasoning")  # templates drop old ones
_NAMES: Final = ("title", "filename", "name", "file_id")  # of a file
_INPUTS: Final = ("input", "action", "arguments", "queries", "query", "code", "operation")
# Fields of results that hold text, or more parts, in the order in which they are read.
_READABLE: Final = (
    *("title", "url", "source", "filename", "text", "stdout", "stderr", "logs", "output"),
    *("content", "outputs", "results", "tool_references", "error_code", "error"),
)
_RESULT_ENDS: Final = ("_tool_result", "_call_output", "_output", "_result")
_CALLS: Final = ("server_tool_use", "mcp_tool_use")
_CALL_END: Final = "_call"
_CALL_RESULTS: Final = ("output", "outputs", "results")


@dataclass(frozen=True, slots=True)
class OtherContent:
    """Part that is not text, as the text that the model reads in its place."""

    text: str
    ignored: str  # type of what the model does not see; empty if all of it is text


@dataclass(frozen=True, slots=True)
class Content:
    """Content of a message: its texts, and the types of parts that the model does not see."""

    texts: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


NO_CONTENT: Final = Content()


@dataclass(frozen=True, slots=True)
class OtherPart:
    """Kind of a part with any type but those in `misplaced`, which belong elsewhere."""

    misplaced: frozenset[str] = frozenset()
    refusal: str = ""

    def read(self, value: Any, param: str) -> OtherContent:
        body = require_object(value, param)
        kind = body.get("type")
        if kind is None:
            refuse_missing(f"{param}.type")
        if require_text(kind, f"{param}.type") in self.misplaced:
            refuse(f"{param}.type", self.refusal.format(repr(kind)), "unsupported_content")
        return other_content(body)

    def schema(self) -> Schema:
        return {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}


OTHER_PART: Final = OtherPart()


def content_kind(part: JsonKind, count_max: int | None = None) -> Mapped:
    """Return the kind of content: one string, or an array of parts, read as `Content`."""
    parts = ArrayOf(part, count_max)
    return Mapped(Either({str: Text(), list: parts}, "a string or an array of parts"), _content)


def _content(content: str | Sequence[str | OtherContent]) -> Content:
    if isinstance(content, str):
        return Content((content,))
    return Content(spaced_texts(content), ignored_types(content))


def spaced_texts(parts: Iterable[str | OtherContent]) -> tuple[str, ...]:
    """Return the texts of parts; those of other content are on lines of their own."""
    texts: list[str] = []
    was_other, end = False, "\n"
    for part in parts:
        is_other = isinstance(part, OtherContent)
        text = part.text if isinstance(part, OtherContent) else part
        if text and (is_other or was_other) and not end.endswith("\n"):
            text = f"\n{text}"
        texts.append(text)
        if text:
            was_other, end = is_other, text
    return tuple(texts)


def ignored_types(parts: Iterable[Any]) -> tuple[str, ...]:
    """Return the types of parts that the model does not see."""
    return tuple(part.ignored for part in parts if isinstance(part, OtherContent) and part.ignored)


def other_content(body: Mapping[str, Any]) -> OtherContent:
    """Return the text that stands for a part, block or item of this type."""
    kind = str(body.get("type", ""))
    ignored = header_word(kind)
    if kind in _NOUNS:
        return _media(body, kind, ignored)
    if kind in _THOUGHTS:
        return OtherContent("", ignored)
    if kind == "search_result":
        return OtherContent(_readable(body), "")
    if kind == "tool_reference":
        return OtherContent(f"[tool: {_short(body.get('tool_name'))}]", ignored)
    if kind in _CALLS or kind.endswith(_CALL_END):
        return OtherContent(_call(body, kind), ignored)
    end = next((end for end in _RESULT_ENDS if kind.endswith(end)), None)
    if end is not None:
        name = _short(body.get("name") or kind.removesuffix(end))
        return OtherContent(_with_title(f"result of {name}", _readable(_result_of(body))), ignored)
    text = body.get("text") or body.get("content")
    if isinstance(text, str):
        return OtherContent(text, ignored)
    return OtherContent(_placeholder(_short(kind)), ignored)


def _placeholder(what: str) -> str:
    return f"[{what} omitted: this model reads text only]"


def _with_title(title: str, text: str) -> str:
    return f"[{title}]\n{text}" if text else _placeholder(title)


def _short(value: Any) -> str:
    """Return a name from the client on one line, cut to a limit."""
    text = value if isinstance(value, str) else "unnamed"
    return " ".join(text.split())[:PLACEHOLDER_NAME_CHARS_MAX] or "unnamed"


def _media(body: Mapping[str, Any], kind: str, ignored: str) -> OtherContent:
    noun = _NOUNS[kind]
    text = _transcript(body) if noun == "audio" else _text_of_file(body)
    if text is not None:
        return OtherContent(text, "")
    file = body.get("file")
    for holder in (body, file if isinstance(file, Mapping) else {}):
        named = next((holder[key] for key in _NAMES if isinstance(holder.get(key), str)), "")
        if named and noun in ("file", "document"):
            return OtherContent(_placeholder(f"{noun} {_short(named)}"), ignored)
    return OtherContent(_placeholder(noun), ignored)


def _transcript(body: Mapping[str, Any]) -> str | None:
    text = body.get("transcript")
    return text if isinstance(text, str) and text else None


def _text_of_file(body: Mapping[str, Any]) -> str | None:
    """Return the text of a document or file that holds text; None for any other."""
    source = body.get("source")
    if isinstance(source, Mapping):
        data = {"text": source.get("data"), "content": source.get("content")}
        text = _readable(data.get(str(source.get("type"))))
        return _lines((body.get("title"), text)) if text else None
    file = body.get("file", body)
    url = file.get("file_data") if isinstance(file, Mapping) else None
    return _text_of_url(url) if isinstance(url, str) else None


def _text_of_url(url: str) -> str | None:
    """Return the text of a data URL whose media type is text."""
    head = url[:256].partition(",")[0]
    if not (head.startswith("data:text/") and head.endswith(";base64")):
        return None
    try:
        return b64decode(url[len(head) + 1 :], validate=True).decode()
    except (BinasciiError, UnicodeDecodeError):
        return None


def _call(body: Mapping[str, Any], kind: str) -> str:
    """Return a hosted tool's call with its input, and the result in the same item."""
    name = _short(body.get("name") or kind.removesuffix(_CALL_END))
    call_input = next((body[key] for key in _INPUTS if body.get(key) not in (None, "")), None)
    if call_input is not None and not isinstance(call_input, str):
        call_input = json.dumps(call_input, ensure_ascii=False, sort_keys=True)
    if call_input is not None and len(call_input) > PLACEHOLDER_INPUT_CHARS_MAX:
        call_input = f"{call_input[:PLACEHOLDER_INPUT_CHARS_MAX]}…"
    call = f"[call of {name}]" if call_input is None else f"[call of {name}: {call_input}]"
    return _lines((call, _readable({key: body.get(key) for key in _CALL_RESULTS})))


def _result_of(body: Mapping[str, Any]) -> Any:
    return body.get("output") if body.get("content") is None else body["content"]


def _readable(value: Any) -> str:
    """Return the texts of a result, one to a line, with placeholders for the rest."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _lines(map(_readable, value))
    if not isinstance(value, Mapping):
        return ""
    kind = value.get("type")
    if kind in _NOUNS or kind == "tool_reference":
        return other_content(value).text
    return _lines(_readable(value.get(key)) for key in _READABLE)


def _lines(texts: Iterable[Any]) -> str:
    return "\n".join(text for text in texts if isinstance(text, str) and text)
