"""GET /v1/models: what the nodes serve, by the names that the nodes give."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.fleet.fleet import Fleet
from router.turns.model_check import ModelCheck


class ModelsApi:
    """Models as OpenAI lists them."""

    def __init__(self, fleet: Fleet) -> None:
        self._models = ModelCheck(fleet)
        self._created_s = int(fleet.clock.wall_s())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.index, methods=["GET"]),
            # A model's name may be a path or hold slashes.
            Route("/v1/models/{model:path}", self.show, methods=["GET"]),
        ]

    async def index(self, _request: Request) -> Response:
        models = [self._model(name) for name in await self._models.names()]
        return JSONResponse({"object": "list", "data": models})

    async def show(self, request: Request) -> Response:
        name = request.path_params["model"]
        await self._models.require(name)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "macfabric",
        }
