"""Routes for questions about one prompt: its length, or its continuation."""

from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.codec import to_plain
from fabric.errors import FabricError
from fabric.hosting.http_server import unless_disconnected
from fabric.keys.cluster_secret import http_secret
from fabric.turn.generation import ContinuedPrompt, GenerateRequest, TokenCount
from node.http.generate import error_response, read_turn


class PromptQuestion:
    """Route of one question; nothing is computed or kept."""

    def __init__(
        self,
        path: str,
        cluster_key: bytes,
        told: Callable[[GenerateRequest], Awaitable[TokenCount | ContinuedPrompt]],
    ) -> None:
        self._path = path
        self._secret = http_secret(cluster_key)
        self._told = told

    def route(self) -> Route:
        return Route(self._path, self.answer, methods=["POST"])

    async def answer(self, request: Request) -> Response:
        try:
            asked = await read_turn(request, self._secret)
            told = await unless_disconnected(request.receive, self._told(asked))
        except FabricError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return JSONResponse(to_plain(told))
