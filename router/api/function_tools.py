"""Functions among a request's tools, as most APIs have them."""

from dataclasses import dataclass
from typing import Any, Final

from router.http.schema import (
    AnyObject,
    ArrayOf,
    Flag,
    ObjectOf,
    Tagged,
    Text,
    as_sent,
    only,
    optional,
    required,
)
from router.limits import TOOLS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """Declaration of a function; templates get it as it was sent."""

    name: str = required(Text(chars_min=1))
    description: str | None = optional(Text())
    parameters: dict[str, Any] | None = optional(AnyObject())
    strict: bool = optional(Flag(), False)
    sent: dict[str, Any] = as_sent()


FUNCTION_TOOL: Final = only("function", ObjectOf(Function))
FUNCTION_TOOLS: Final = ArrayOf(
    Tagged({"function": FUNCTION_TOOL}, "only functions are supported"), TOOLS_MAX
)
