"""How routes are described in the OpenAPI document: schemas, parameters and answers, in short.

Each room describes its own routes; `router.api.openapi` puts them together, and tests hold every
description to what the routes read and answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from fabric.edit_mode import EDIT_MODES
from fabric.limits import POLICIES_MAX, POLICY_NAME_CHARS_MAX
from fabric.turn.generation import MatchKind
from router.api.edit_fields import EDITS_HEADER, OWN_FIELD, POLICIES_HEADER
from router.http.turn_headers import AGENT_HEADER, PREFETCH_HEADER, PRIORITY_HEADER

Schema: TypeAlias = dict[str, Any]

# Of any route, and what bounds requests before one is reached.
EVERYWHERE: Final = (400, 401, 408, 413, 414, 429, 431, 500, 503, 529)
TENANTS: Final = (*EVERYWHERE, 403)  # an operator's key alone is none of these
NAMED: Final = (*TENANTS, 404)
WRITES: Final = (*NAMED, 409, 507)
MEANINGS: Final = {
    400: "The request is wrong: repeating it cannot help.",
    401: "No key where one is needed, or an unknown one.",
    403: "The key allows something else.",
    404: "There is none, and every node has answered.",
    408: "Headers or body come too slowly.",
    409: "It contradicts the present state.",
    413: "A body, or its number of values, is over its limit.",
    414: "The URL is too long.",
    429: "A bounded queue is full; `Retry-After` says when to come again.",
    431: "The headers are too large, or too many.",
    500: "The server failed on this request.",
    503: "Come again after `Retry-After`.",
    507: "No node has room.",
    529: "503 in Anthropic's dialect.",
}
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"


def text(**more: Any) -> Schema:
    """Describe a string."""
    return {"type": "string", **more}


def integer(low: int | None = 0, high: int | None = None) -> Schema:
    """Describe an integer."""
    return _bounded("integer", low, high)


def number(low: float | None = 0, high: float | None = None) -> Schema:
    """Describe a number."""
    return _bounded("number", low, high)


def _bounded(kind: str, low: float | None, high: float | None) -> Schema:
    bounds = {"minimum": low, "maximum": high}
    return {"type": kind, **{name: value for name, value in bounds.items() if value is not None}}


def one_of(*values: str) -> Schema:
    """Describe a word of a few."""
    return {"type": "string", "enum": list(values)}


def array(items: Schema, count_max: int | None = None, count_min: int | None = None) -> Schema:
    """Describe a list."""
    bounds = {"maxItems": count_max, "minItems": count_min}
    told = {name: value for name, value in bounds.items() if value is not None}
    return {"type": "array", "items": items, **told}


def either(*schemas: Schema) -> Schema:
    """Describe what may be of several kinds."""
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    """Describe what may be null, too."""
    return either(schema, {"type": "null"})


def ref(name: str) -> Schema:
    """Name a schema among the components."""
    return {"$ref": f"#/components/schemas/{name}"}


FLAG: Final[Schema] = {"type": "boolean"}
ANYTHING: Final[Schema] = {}
OBJECT: Final[Schema] = {"type": "object"}
# Of a stream: `data` is JSON, or `[DONE]` behind the last of OpenAI's.
EVENT: Final[Schema] = {
    "type": "object",
    "properties": {"data": text(), "event": text(), "id": text()},
    "required": ["data"],
}


def answer(**properties: Schema) -> Schema:
    """Describe an object of ours, which has all of these, and may come to have more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def with_rare(schema: Schema, **properties: Schema) -> Schema:
    """Add what only some of such answers have."""
    return {**schema, "properties": {**schema["properties"], **properties}}


def body(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    """Describe a client's object: what is optional may be null."""
    known = {name: nullable(schema) if schema else schema for name, schema in optional.items()}
    return {
        "type": "object",
        "properties": {**required, **known},
        "required": list(required),
    }


def listing(items: Schema, **more: Schema) -> Schema:
    """Describe a list as OpenAI's clients expect it."""
    return answer(object=one_of("list"), data=array(items), **more)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A part of the path, the query or the headers."""

    name: str
    place: str
    schema: Schema
    says: str

    def told(self) -> Schema:
        return {
            "name": self.name,
            "in": self.place,
            "required": self.place == "path",
            "schema": self.schema,
            "description": self.says,
        }


AGENT_ID: Final = text(pattern="^[A-Za-z0-9][A-Za-z0-9._:@+=~-]{0,127}$")
EDIT_HEADERS: Final = (
    Parameter(
        EDITS_HEADER,
        "header",
        one_of(*EDIT_MODES),
        "What becomes of the agent's memory behind what was dropped or replaced in its middle: "
        "computed again, or kept.",
    ),
    Parameter(
        POLICIES_HEADER,
        "header",
        text(),
        "Names of the policies that edit the conversation, in order, instead of the operator's.",
    ),
)
TURN_HEADERS: Final = (
    Parameter(AGENT_HEADER, "header", AGENT_ID, "Names the agent."),
    Parameter(
        PRIORITY_HEADER,
        "header",
        one_of("interactive", "background"),
        "Who goes first where not everybody can.",
    ),
    Parameter(PREFETCH_HEADER, "header", text(), "Up to four agents whose turns come next."),
    *EDIT_HEADERS,
)
# Of every answer to a turn.
TURN_ANSWER_HEADERS: Final = {
    "x-macfabric-agent": AGENT_ID,
    "x-macfabric-node": text(),
    "x-macfabric-epoch": integer(1),
    "x-macfabric-cache": one_of("cold", "hot", "disk", "peer"),
    "x-macfabric-match": one_of(*MatchKind),
    "x-macfabric-match-reason": text(),
    "x-macfabric-cached-tokens": integer(),
}


# Of those where there is something to say.
EDIT_ANSWER_HEADERS: Final = {POLICIES_HEADER: text()}
TURN_RARE_HEADERS: Final = {
    **EDIT_ANSWER_HEADERS,
    "x-macfabric-amortized-tokens": integer(1),
    "x-macfabric-template": text(),
    "x-macfabric-ignored": text(),
}


@dataclass(frozen=True, slots=True)
class Described:
    """One operation of one route."""

    method: str
    path: str
    tag: str
    says: str
    answers: Mapping[str, Schema]  # by media type
    errors: Sequence[int]
    body: Schema | None = None
    body_type: str = JSON
    needs_body: bool = True
    parameters: Sequence[Parameter] = ()
    headers: Mapping[str, Schema] = field(default_factory=dict)  # of the answer
    rare_headers: Mapping[str, Schema] = field(default_factory=dict)  # of some answers
    statuses: Sequence[int] = (200,)  # that `answers` come with
    error: str = "Error"  # how they are spelled
    key: str = "tenant"  # "tenant", "operator" or "none"
    detail: str = ""
    x_codes: Mapping[int, str] = field(default_factory=dict)  # other meanings of a status

    def told(self) -> Schema:
        """Spell it as OpenAPI does."""
        operation: Schema = {
            "tags": [self.tag],
            "summary": self.says,
            "operationId": _name_of(self.method, self.path),
            "responses": {**self._good(), **self._bad()},
            "security": _SECURITY[self.key],
        }
        if self.detail:
            operation["description"] = self.detail
        if self.parameters:
            operation["parameters"] = [parameter.told() for parameter in self.parameters]
        if self.body is not None:
            content = {self.body_type: {"schema": self.body}}
            operation["requestBody"] = {"required": self.needs_body, "content": content}
        return operation

    def _good(self) -> Schema:
        content = {media: {"schema": schema} for media, schema in self.answers.items()}
        told: Schema = {"description": self.says}
        if content:
            told["content"] = content
        headers = {
            name: {"schema": schema, "required": name in self.headers}
            for name, schema in (*self.headers.items(), *self.rare_headers.items())
        }
        if headers:
            told["headers"] = headers
        return {str(status): told for status in self.statuses}

    def _bad(self) -> Schema:
        return {
            str(status): {
                "description": self.x_codes.get(status, MEANINGS[status]),
                "content": {JSON: {"schema": ref(self.error)}},
            }
            for status in sorted(set(self.errors))
            if status not in self.statuses
        }


_POLICY: Final = text(maxLength=POLICY_NAME_CHARS_MAX)
_OWN: Final = body(
    {},
    edits=one_of(*EDIT_MODES),
    policies=array(either(_POLICY, body({"name": _POLICY}, options=OBJECT)), POLICIES_MAX),
)


def with_own(schema: Schema) -> Schema:
    """Add the field of ours that every dialect's body may have."""
    return {**schema, "properties": {**schema["properties"], OWN_FIELD: nullable(_OWN)}}


def described_turn(
    path: str,
    tag: str,
    says: str,
    *,
    whole: Schema,
    body: Schema,
    parameters: Sequence[Parameter] = TURN_HEADERS,
    errors: Sequence[int] = WRITES,
    error: str = "Error",
) -> Described:
    """Describe a route that answers a turn, whole or as its events come."""
    return Described(
        "POST",
        path,
        tag,
        says,
        {JSON: whole, EVENTS: EVENT},
        errors,
        body=with_own(body),
        parameters=parameters,
        headers=TURN_ANSWER_HEADERS,
        rare_headers=TURN_RARE_HEADERS,
        error=error,
    )


_ANY_KEY: Final[list[Schema]] = [{"bearer": []}, {"apiKey": []}, {}]
_SECURITY: Final[Mapping[str, Any]] = {
    "tenant": _ANY_KEY,
    "operator": [{"operatorKey": []}, {"bearer": []}],
    "none": [],
}


def _name_of(method: str, path: str) -> str:
    words = path.replace("/", " ").replace("{", " ").replace("}", " ").replace(".", " ").split()
    return "_".join([method.lower(), *(word for word in words if word != "v1")])
