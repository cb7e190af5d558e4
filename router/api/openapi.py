"""GET /openapi.json: requests and answers of every route, for generators of clients."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric import __version__
from fabric.keys.api_keys import OPERATOR_HEADER
from router.api.description import EVERYWHERE, JSON, OBJECT, Described, answer, text
from router.http.schema import Schema

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
