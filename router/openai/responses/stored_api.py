"""Stored responses: GET and DELETE /v1/responses/ID."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.errors import NotFoundError
from router.http.auth import tenant_of
from router.http.refusals import unsupported
from router.openai.responses.store import ResponseStore, StoredResponse


class StoredApi:
    """Stored responses and their inputs, as long as they are kept."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses/{response}", self.show, methods=["GET"]),
            Route("/v1/responses/{response}", self.delete, methods=["DELETE"]),
            Route("/v1/responses/{response}/input_items", self.given, methods=["GET"]),
        ]

    async def show(self, request: Request) -> Response:
        if request.query_params.get("stream", "false").lower() != "false":
            unsupported("stream", "a stored response is complete: fetch it whole")
        return JSONResponse(self._stored(request).body)

    async def delete(self, request: Request) -> Response:
        name = self._stored(request).name
        self._store.delete(tenant_of(request), name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    async def given(self, request: Request) -> Response:
        stored = self._stored(request)
        items = [
            {"id": f"{stored.name}_{index}", "type": "message", **item}
            for index, item in enumerate(stored.given)
        ]
        ends = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        page = {"data": items, "first_id": ends[0], "last_id": ends[1], "has_more": False}
        return JSONResponse({"object": "list", **page})

    def _stored(self, request: Request) -> StoredResponse:
        name = request.path_params["response"]
        stored = self._store.get(tenant_of(request), name)
        if stored is None:
            message = f"Response with id '{name[:100]}' not found: not stored, or dropped since."
            raise NotFoundError(message, code="response_not_found")
        return stored
