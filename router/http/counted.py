"""Counts of answers by route, method and class of status."""

from collections.abc import Callable, Iterable
from typing import Final

from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OTHER: Final = "(other)"  # no path has brackets
_METHODS: Final = frozenset({"GET", "HEAD", "POST", "DELETE", "OPTIONS"})


class CountedAnswers:
    """Outermost middleware: counts each answer once, by its route's path and never by the URL."""

    def __init__(
        self, app: ASGIApp, routes: Iterable[BaseRoute], count: Callable[[str, str, str], None]
    ) -> None:
        """Count by `count(route, method, class)`."""
        self._app = app
        named = (route for route in routes if isinstance(route, Route))
        self._paths: dict[object, str] = {route.endpoint: route.path for route in named}
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the inner application, and count what it answers."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = self._paths.get(scope.get("endpoint"), OTHER)
                method = scope["method"] if scope["method"] in _METHODS else OTHER
                self._count(path, method, f"{message['status'] // 100}xx")
            await send(message)

        await self._app(scope, receive, counted)
