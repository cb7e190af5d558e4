"""The route on which the router asks for the prompt that continues what an agent remembers."""

from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.codec import to_plain
from fabric.errors import FabricError
from fabric.keys.cluster_secret import http_secret
from fabric.turn.generation import APPEND_PATH, ContinuedPrompt, GenerateRequest
from node.http.generate import error_response, read_turn


class AppendHttp:
    """Serves the route; nothing is computed or kept."""

    def __init__(
        self,
        cluster_key: bytes,
        prompt: Callable[[GenerateRequest], Awaitable[ContinuedPrompt]],
    ) -> None:
        self._secret = http_secret(cluster_key)
        self._prompt = prompt

    def routes(self) -> list[Route]:
        return [Route(APPEND_PATH, self.append, methods=["POST"])]

    async def append(self, request: Request) -> Response:
        try:
            told = await self._prompt(await read_turn(request, self._secret))
        except FabricError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return JSONResponse(to_plain(told))
