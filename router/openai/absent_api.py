"""Routes of OpenAI's that this server does not have, and says so by name."""

from typing import NoReturn

from starlette.requests import Request
from starlette.routing import Route

from fabric.errors import NotFoundError


def absent_routes() -> list[Route]:
    """Answer 404 for what programs that embed text ask first."""

    async def embeddings(_request: Request) -> NoReturn:
        message = "there are no embeddings here: the models of this server generate text"
        raise NotFoundError(message, code="no_embeddings")

    return [Route("/v1/embeddings", embeddings, methods=["POST"])]
