"""Objects whose JSON text ends early: the arguments of a call that was cut."""

import json
import re
from typing import Any, Final

from fabric.limits import JSON_DEPTH_MAX

_ENDS_TRIED_MAX: Final = 8  # of a cut text; the first ones fit, unless it is malformed
# Brackets, commas and strings; a string that is cut has no quote at its end.
_TOKEN: Final = re.compile(r'[\[\]{},]|"(?:[^"\\]|\\.)*(?P<quote>"?)', re.DOTALL)
# An escape that is cut, or the first half of a surrogate pair.
_CUT_ESCAPE: Final = re.compile(
    r"(?<!\\)(?:\\\\)*(?P<escape>\\(?:u[0-9a-fA-F]{0,3}|"
    r"u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?)$"
)


def whole_members(text: str, *, cuts_text: bool = False) -> dict[str, Any]:
    """Return an object's members that are whole; with `cuts_text`, also the text that is cut.

    Empty where the text is no beginning of an object.
    """
    ends: list[tuple[int, str]] = []  # places where brackets end the object
    open_brackets = ""
    for token in _TOKEN.finditer(text):
        char = token[0][0]
        if char in "[{":
            open_brackets += "]" if char == "[" else "}"
            ends.append((token.end(), open_brackets))
        elif char in "]}":
            open_brackets = open_brackets[:-1]
            ends.append((token.end(), open_brackets))
        elif char == ",":
            ends.append((token.start(), open_brackets))
        elif cuts_text and not token["quote"]:
            escape = _CUT_ESCAPE.search(text)
            ends.append((escape.start("escape") if escape else len(text), open_brackets + '"'))
        if len(open_brackets) > JSON_DEPTH_MAX:
            return {}
    if not text[-1:].isdigit():  # a number may continue
        ends.append((len(text), open_brackets))
    for end, brackets in reversed(ends[-_ENDS_TRIED_MAX:]):
        try:
            value = json.loads(text[:end] + brackets[::-1])
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else {}
    return {}
