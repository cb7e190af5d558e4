"""Tools that a vendor runs, such as web search: left out of the prompt, and listed as ignored."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from router.http.refusals import refuse, require_object, require_text
from router.http.schema import JsonKind, Schema, Tagged, either, refuse_missing
from router.http.turn_headers import header_word


@dataclass(frozen=True, slots=True)
class HostedTool:
    """Declaration of a tool of another type than those that the client runs."""

    type: str
    name: str  # by which a choice of tools may name it

    @property
    def ignored(self) -> str:
        """Type, as a header of the answer can carry it."""
        return header_word(self.type)


@dataclass(frozen=True, slots=True)
class AnyTool:
    """Kind of a tool: one of `kinds` by its type, and a hosted tool of any other type.

    Types in `refused` are not, and neither is a tool that has the field `declares`, as only
    functions have: its type is misspelled.
    """

    kinds: Mapping[str, JsonKind]
    refusal: str = ""
    refused: tuple[str, ...] = ()
    declares: str = ""
    default: str = ""  # type of tools without one

    def read(self, value: Any, param: str) -> Any:
        body = require_object(value, param)
        at = f"{param}.type"
        word = body.get("type") or self.default
        if not word:
            refuse_missing(at)
        kind = self.kinds.get(require_text(word, at))
        if kind is not None:
            return kind.read(body, param)
        if word in self.refused or body.get(self.declares) is not None:
            refuse(at, self.refusal.format(repr(word[:64])), "unsupported_parameter")
        name = body.get("name")
        return HostedTool(word, name if isinstance(name, str) else word)

    def schema(self) -> Schema:
        known = Tagged(self.kinds, default=self.default).schema()
        typed = {"type": "object", "properties": {"type": {"type": "string"}}}
        return either(known, {**typed, "required": ["type"]})


def hosted_types(tools: Iterable[Any]) -> tuple[str, ...]:
    """Return the types of the hosted tools, for the answer's header."""
    return tuple(tool.ignored for tool in tools if isinstance(tool, HostedTool))
