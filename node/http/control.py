"""The route for control calls that a client waits for.

HEAD does nothing: with it the router opens a connection before such a call.
"""

from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from fabric.control.calls import CONTROL_PATH, NODE_HEADER
from fabric.errors import FabricError, RetryElsewhereError
from fabric.ids import NodeName
from fabric.keys.cluster_secret import http_secret
from fabric.limits import CONTROL_BYTES_MAX
from node.http.generate import authorize, error_response, read_body


class ControlHttp:
    """Route of control calls; a call is completed even if the router no longer waits for it."""

    def __init__(
        self, name: NodeName, cluster_key: bytes, answer: Callable[[bytes], Awaitable[bytes]]
    ) -> None:
        self._name = name
        self._secret = http_secret(cluster_key)
        self._answer = answer

    def routes(self) -> list[Route]:
        return [Route(CONTROL_PATH, self.control, methods=["HEAD", "POST"])]

    async def control(self, request: Request) -> Response:
        try:
            authorize(request, self._secret)
            if request.headers.get(NODE_HEADER) != self._name:
                message = "another node listens here now"
                raise RetryElsewhereError(message, code="wrong_node")
            if request.method == "HEAD":
                return Response(status_code=204)
            raw = await read_body(request, CONTROL_BYTES_MAX)
        except FabricError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return Response(await self._answer(raw), media_type="application/msgpack")
