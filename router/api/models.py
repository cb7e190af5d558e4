"""GET /v1/models: the models and their aliases, which stand for them in every request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.fleet.fleet import Fleet

ANY: Final = "*"  # at an alias's end: any suffix


class ModelNames:
    """Aliases of models, from configuration."""

    def __init__(self, fleet: Fleet, aliases: Mapping[str, str]) -> None:
        self._fleet = fleet
        self._exact = {name: model for name, model in aliases.items() if not name.endswith(ANY)}
        prefixes = [(name[:-1], model) for name, model in aliases.items() if name.endswith(ANY)]
        self._prefixes = sorted(prefixes, key=lambda pair: len(pair[0]), reverse=True)

    @property
    def listed(self) -> list[str]:
        """The aliases without a wildcard."""
        return sorted(self._exact)

    async def resolve(self, name: str) -> str:
        """Return the model of a name or alias; the longest matching prefix wins."""
        if name in self._exact:
            return self._exact[name]
        matching = (model for prefix, model in self._prefixes if name.startswith(prefix))
        model = next(matching, None)
        if model is None or name in self._fleet.models():
            return name
        # A node that has not joined yet may serve a model of exactly this name.
        return name if name in await self._fleet.discovery.models() else model


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model or alias, with the limits that clients plan their conversations by."""

    name: str
    created_s: int
    context_tokens_max: int | None  # prompt and answer together; None: no node serves it now
    completion_tokens_max: int | None  # of one answer


class ModelsDialect(Protocol):
    """Format of models in one dialect."""

    def model(self, model: ListedModel) -> dict[str, Any]:
        """Return one model as JSON."""

    def listing(self, models: Sequence[ListedModel], query: Mapping[str, str]) -> dict[str, Any]:
        """Return all models as JSON; `query` has the parameters of the request's URL."""


class ModelsApi:
    """Models by name; a header of the client selects the dialect."""

    def __init__(
        self,
        fleet: Fleet,
        names: ModelNames,
        default: ModelsDialect,
        by_header: Mapping[str, ModelsDialect],
        completion_tokens_max: int,
    ) -> None:
        self._fleet = fleet
        self._completion_tokens_max = completion_tokens_max
        self._names = names
        self._default = default
        self._by_header = by_header
        self._created_s = int(fleet.clock.wall_s())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.index, methods=["GET"]),
            # A model's name may be a path or hold slashes.
            Route("/v1/models/{model:path}", self.show, methods=["GET"]),
        ]

    async def index(self, request: Request) -> Response:
        dialect, served = self._dialect(request), await self._fleet.discovery.models()
        names = [*served, *(name for name in self._names.listed if name not in served)]
        models = [self._model_row(name, await self._names.resolve(name)) for name in names]
        return JSONResponse(dialect.listing(models, request.query_params))

    async def show(self, request: Request) -> Response:
        name = request.path_params["model"]
        model = await self._names.resolve(name)
        await self._fleet.discovery.require_model(model)
        return JSONResponse(self._dialect(request).model(self._model_row(name, model)))

    def _model_row(self, name: str, model: str) -> ListedModel:
        """Return a model under the client's name for it."""
        context = self._fleet.context_tokens_max(model)
        answer = None if context is None else min(context, self._completion_tokens_max)
        return ListedModel(name, self._created_s, context, answer)

    def _dialect(self, request: Request) -> ModelsDialect:
        chosen = (d for name, d in self._by_header.items() if name in request.headers)
        return next(chosen, self._default)
