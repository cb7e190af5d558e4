"""The route on which the router asks how many tokens a prompt has."""

from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.codec import to_plain
from fabric.errors import FabricError
from fabric.keys.cluster_secret import http_secret
from fabric.turn.generation import COUNT_PATH, GenerateRequest, TokenCount
from node.http.generate import error_response, read_turn


class CountHttp:
    """Serves the route; nothing is computed or kept."""

    def __init__(
        self, cluster_key: bytes, count: Callable[[GenerateRequest], Awaitable[int]]
    ) -> None:
        self._secret = http_secret(cluster_key)
        self._count = count

    def routes(self) -> list[Route]:
        return [Route(COUNT_PATH, self.count, methods=["POST"])]

    async def count(self, request: Request) -> Response:
        try:
            tokens = await self._count(await read_turn(request, self._secret))
        except FabricError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return JSONResponse(to_plain(TokenCount(tokens)))
