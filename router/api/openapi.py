"""The OpenAPI document at GET /openapi.json, and the building blocks with which routes describe it.

Each room describes its own routes, and this module combines them. Bodies are described by the
declarations that parse them; tests check answers against their descriptions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric import __version__
from fabric.edit_mode import EDIT_MODES, TRUNCATIONS
from fabric.keys import OPERATOR_HEADER
from fabric.turn.generation import MatchKind
from router.api.edit_fields import ANY_BODY, EDITS_HEADER, POLICIES_HEADER, TRUNCATION_HEADER
from router.http import schema
from router.http.schema import Schema, nullable
from router.http.turn_headers import AGENT_HEADER, PREFETCH_HEADER, PRIORITY_HEADER

# Statuses of every route, including those of the middleware.
EVERYWHERE: Final = (400, 401, 403, 408, 413, 414, 429, 431, 500, 503, 529)
TENANTS: Final = EVERYWHERE
NAMED: Final = (*TENANTS, 404)
WRITES: Final = (*NAMED, 409, 507)
MEANINGS: Final = {
    400: "The request is invalid; do not repeat it.",
    401: "The API key is missing or unknown.",
    403: "The key does not allow this.",
    404: "Not found on any node.",
    408: "Headers or body arrive too slowly.",
    409: "It conflicts with the present state.",
    413: "The body, or its number of values, is over the limit.",
    414: "The URL is too long.",
    429: "A queue is full; retry after `Retry-After`.",
    431: "The headers are too large, or too many.",
    500: "The server failed on this request.",
    503: "Unavailable for now; retry after `Retry-After`.",
    507: "No node has room.",
    529: "503 in Anthropic's dialect.",
}
JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"


def text(**more: Any) -> Schema:
    """Return the schema of a string."""
    return {"type": "string", **more}


def integer(low: int | None = 0, high: int | None = None) -> Schema:
    """Return the schema of an integer."""
    return _bounded_schema("integer", low, high)


def number(low: float | None = 0, high: float | None = None) -> Schema:
    """Return the schema of a number."""
    return _bounded_schema("number", low, high)


def _bounded_schema(kind: str, low: float | None, high: float | None) -> Schema:
    bounds = {"minimum": low, "maximum": high}
    return {"type": kind, **{name: value for name, value in bounds.items() if value is not None}}


def one_of(*values: str) -> Schema:
    """Return the schema of one of the words."""
    return {"type": "string", "enum": list(values)}


def array(items: Schema, count_max: int | None = None, count_min: int | None = None) -> Schema:
    """Return the schema of an array."""
    bounds = {"maxItems": count_max, "minItems": count_min}
    given = {name: value for name, value in bounds.items() if value is not None}
    return {"type": "array", "items": items, **given}


def ref(name: str) -> Schema:
    """Return a reference to a named schema under `components`."""
    return {"$ref": f"#/components/schemas/{name}"}


FLAG: Final[Schema] = {"type": "boolean"}
OBJECT: Final[Schema] = {"type": "object"}
# Event of a stream: `data` is JSON, or `[DONE]` after the last of OpenAI's.
EVENT: Final[Schema] = {
    "type": "object",
    "properties": {"data": text(), "event": text(), "id": text()},
    "required": ["data"],
}


def answer(**properties: Schema) -> Schema:
    """Return the schema of an answer that has all of these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def with_rare(schema: Schema, **properties: Schema) -> Schema:
    """Return the schema with properties that only some answers have."""
    return {**schema, "properties": {**schema["properties"], **properties}}


def body(required: Mapping[str, Schema], **optional: Schema) -> Schema:
    """Describe a client's object: optional fields may be null."""
    known = {name: nullable(schema) if schema else schema for name, schema in optional.items()}
    return {
        "type": "object",
        "properties": {**required, **known},
        "required": list(required),
    }


def listing(items: Schema, **more: Schema) -> Schema:
    """Return the schema of a list in OpenAI's form."""
    return answer(object=one_of("list"), data=array(items), **more)


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter in the path, the query or the headers."""

    name: str
    place: str
    schema: Schema
    says: str

    def as_openapi(self) -> Schema:
        return {
            "name": self.name,
            "in": self.place,
            "required": self.place == "path",
            "schema": self.schema,
            "description": self.says,
        }


AGENT_ID: Final = schema.AGENT_ID.schema()
AGENT: Final = Parameter("agent", "path", AGENT_ID, "The tenant's own agent.")
EDIT_HEADERS: Final = (
    Parameter(
        EDITS_HEADER,
        "header",
        one_of(*EDIT_MODES),
        "How the agent's cache after an edit is treated: recomputed, or kept.",
    ),
    Parameter(
        POLICIES_HEADER,
        "header",
        text(),
        "Policies that edit the conversation, in order, instead of the operator's.",
    ),
    Parameter(
        TRUNCATION_HEADER,
        "header",
        one_of(*TRUNCATIONS),
        "Whether the oldest turns of a prompt over the context are dropped.",
    ),
)
TURN_HEADERS: Final = (
    Parameter(AGENT_HEADER, "header", AGENT_ID, "Names the agent."),
    Parameter(
        PRIORITY_HEADER,
        "header",
        one_of("interactive", "background"),
        "Priority of the turn while slots are short.",
    ),
    Parameter(
        PREFETCH_HEADER,
        "header",
        text(),
        "Up to four agents whose turns come next, to load their caches.",
    ),
    *EDIT_HEADERS,
)
# Headers of every answer to a turn.
TURN_ANSWER_HEADERS: Final = {
    "x-macfabric-agent": AGENT_ID,
    "x-macfabric-node": text(),
    "x-macfabric-epoch": integer(1),
    "x-macfabric-cache": one_of("cold", "hot", "disk", "peer"),
    "x-macfabric-match": one_of(*MatchKind),
    "x-macfabric-match-reason": text(),
    "x-macfabric-cached-tokens": integer(),
}


# Headers of some answers.
EDIT_ANSWER_HEADERS: Final = {POLICIES_HEADER: text()}
TURN_RARE_HEADERS: Final = {
    **EDIT_ANSWER_HEADERS,
    "x-macfabric-amortized-tokens": integer(1),
    "x-macfabric-template": text(),
    "x-macfabric-ignored": text(),
}


@dataclass(frozen=True, slots=True)
class Described:
    """OpenAPI operation: one method of one route."""

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
    statuses: Sequence[int] = (200,)  # of a successful answer
    error: str = "Error"  # schema of the errors
    key: str = "tenant"  # "tenant", "operator" or "none"
    detail: str = ""
    x_codes: Mapping[int, str] = field(default_factory=dict)  # other meanings of a status

    def as_openapi(self) -> Schema:
        """Return the operation as OpenAPI has it."""
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
            operation["parameters"] = [parameter.as_openapi() for parameter in self.parameters]
        if self.body is not None:
            content = {self.body_type: {"schema": self.body}}
            operation["requestBody"] = {"required": self.needs_body, "content": content}
        return operation

    def _good(self) -> Schema:
        content = {media: {"schema": schema} for media, schema in self.answers.items()}
        answer: Schema = {"description": self.says}
        if content:
            answer["content"] = content
        headers = {
            name: {"schema": schema, "required": name in self.headers}
            for name, schema in (*self.headers.items(), *self.rare_headers.items())
        }
        if headers:
            answer["headers"] = headers
        return {str(status): answer for status in self.statuses}

    def _bad(self) -> Schema:
        return {
            str(status): {
                "description": self.x_codes.get(status, MEANINGS[status]),
                "content": {JSON: {"schema": ref(self.error)}},
            }
            for status in sorted(set(self.errors))
            if status not in self.statuses
        }


def with_macfabric_field(schema: Schema) -> Schema:
    """Return the schema of a body with the `macfabric` field, which every dialect takes."""
    return {**schema, "properties": {**schema["properties"], **ANY_BODY.schema()["properties"]}}


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
    """Return the operation of a route that answers a turn, whole or streamed."""
    return Described(
        "POST",
        path,
        tag,
        says,
        {JSON: whole, EVENTS: EVENT},
        errors,
        body=with_macfabric_field(body),
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


PATH: Final = "/openapi.json"
_SAYS: Final = (
    "OpenAI's and Anthropic's APIs, and the fabric's own for agents and nodes. Unknown fields are "
    "ignored by the first two and refused by the fabric's own; null is the same as absent. HEAD is "
    "answered wherever GET is. "
    "Errors have Anthropic's shape below /v1/messages and wherever a request has an "
    "`anthropic-version`; what is 503 elsewhere is 529 there."
)
_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "A tenant's API key."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    "operatorKey": {"type": "apiKey", "in": "header", "name": OPERATOR_HEADER},
}
DESCRIBED: Final = Described(
    "GET",
    PATH,
    "fabric",
    "This document.",
    {JSON: answer(openapi=text(), paths=OBJECT)},
    EVERYWHERE,
)


def document(operations: Sequence[Described], schemas: Mapping[str, Schema]) -> dict[str, Any]:
    """Return the OpenAPI document of the operations."""
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = operation.as_openapi()
    return {
        "openapi": "3.1.0",
        "info": {"title": "macfabric", "version": __version__, "description": _SAYS},
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(schemas.items())), "securitySchemes": _SCHEMES},
    }


def openapi_routes(document: Mapping[str, Any]) -> list[Route]:
    """Return the route of the document."""

    async def show(_request: Request) -> Response:
        return JSONResponse(document)

    return [Route("/openapi.json", show, methods=["GET"])]
