"""GET /openapi.json: what every route reads and answers, for programs that make clients of it."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric import __version__
from fabric.keys.api_keys import OPERATOR_HEADER
from router.api.description import EVERYWHERE, JSON, OBJECT, Described, Schema, answer, text

PATH: Final = "/openapi.json"
_SAYS: Final = (
    "OpenAI's and Anthropic's APIs, and the fabric's own for agents and nodes. Unknown fields of "
    "requests are ignored, and null is the same as absent. HEAD is answered wherever GET is. "
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
    """Put the descriptions together."""
    paths: dict[str, Any] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method.lower()] = each.told()
    return {
        "openapi": "3.1.0",
        "info": {"title": "macfabric", "version": __version__, "description": _SAYS},
        "paths": dict(sorted(paths.items())),
        "components": {"schemas": dict(sorted(schemas.items())), "securitySchemes": _SCHEMES},
    }


def openapi_routes(told: Mapping[str, Any]) -> list[Route]:
    """Answer with the document."""

    async def show(_request: Request) -> Response:
        return JSONResponse(told)

    return [Route("/openapi.json", show, methods=["GET"])]
