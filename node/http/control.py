"""The route on which the router makes those control calls that a client waits for.

HEAD there does nothing: the router opens by it what such a call finds open.
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
    """Serves the route; a call goes on to its end whether or not the router waits for it."""

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
                message = "another node listens here by now"
                raise RetryElsewhereError(message, code="wrong_node")
            if request.method == "HEAD":
                return Response(status_code=204)
            raw = await read_body(request, CONTROL_BYTES_MAX)
        except FabricError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=400)
        return Response(await self._answer(raw), media_type="application/msgpack")
