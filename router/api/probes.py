"""Answers to clients that probe for features of other servers."""

from typing import NoReturn

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fabric.errors import FabricError, NotFoundError
from router.http.errors import ErrorBody


class PlainErrors:
    """Errors as Ollama's clients read them: a text, without type or code."""

    def error(self, error: FabricError) -> ErrorBody:
        return ErrorBody({"error": error.message})


def probe_routes() -> list[Route]:
    """Return the routes that clients try first: whether a server is there, and embeddings."""

    async def present(_request: Request) -> Response:
        return Response()

    async def embeddings(_request: Request) -> NoReturn:
        message = "this server has no embeddings: its models generate text"
        raise NotFoundError(message, code="no_embeddings")

    return [
        Route("/", present, methods=["HEAD"]),
        Route("/v1/embeddings", embeddings, methods=["POST"]),
    ]
