"""POST /v1/messages/count_tokens: what a prompt would be charged, by the model's own tokenizer."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.turn.generation import Identity, IdentityKind, Sampling
from router.anthropic.content import Notes
from router.anthropic.request import AskedPrompt, parse_prompt
from router.api.model_names import ModelNames
from router.fleet.fleet import Fleet
from router.fleet.token_counts import TokenCounts
from router.fresh_ids import fresh_operation
from router.http.auth import tenant_of
from router.http.disconnect import unless_gone
from router.http.fields import Fields
from router.http.json_body import read_parsed
from router.turn_request import TurnRequest
from router.turns.model_check import ModelCheck

COUNT_TOKENS_PATH: Final = "/v1/messages/count_tokens"


class CountTokensApi:
    """Counts what would be sent; nothing is computed."""

    def __init__(self, fleet: Fleet, names: ModelNames) -> None:
        self._names = names
        self._models = ModelCheck(fleet)
        self._counts = TokenCounts(fleet)

    def routes(self) -> list[Route]:
        return [Route("/v1/messages/count_tokens", self.count, methods=["POST"])]

    async def count(self, request: Request) -> Response:
        said = await read_parsed(request, _parse)
        turn = TurnRequest(
            operation=fresh_operation(),
            tenant=tenant_of(request),
            model=await self._names.resolve(said.model),
            identity=Identity(IdentityKind.CONTENT),
            sampling=Sampling(),
            prompt=said.prompt,
        )
        await self._models.require(turn.model)
        tokens = await unless_gone(request, self._counts.count(turn))
        return JSONResponse({"input_tokens": tokens})


def _parse(body: dict[str, Any]) -> AskedPrompt:
    return parse_prompt(Fields(body), Notes())
