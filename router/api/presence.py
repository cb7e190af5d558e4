"""HEAD /: coding agents look whether anybody is there before they ask for anything."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def presence_routes() -> list[Route]:
    """Answer with nothing."""

    async def present(_request: Request) -> Response:
        return Response()

    return [Route("/", present, methods=["HEAD"])]
