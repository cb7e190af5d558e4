"""POST /v1/messages/count_tokens: what a prompt would be charged, by the model's own tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.hosting.http_server import unless_disconnected
from router.anthropic.content import Notes
from router.anthropic.request import AskedPrompt, parse_prompt
from router.api.edit_fields import WantedEdits, edits_of
from router.api.edit_stage import EditStage, OnePromptDesk, edit_headers
from router.api.model_names import ModelNames
from router.fleet.fleet import Fleet
from router.http.auth import tenant_of
from router.http.fields import Fields
from router.http.json_body import read_parsed
from router.turns.model_check import ModelCheck

COUNT_TOKENS_PATH: Final = "/v1/messages/count_tokens"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A checked request."""

    said: AskedPrompt
    edits: WantedEdits


class CountTokensApi:
    """Counts what would be sent; nothing is computed."""

    def __init__(self, fleet: Fleet, names: ModelNames, edits: EditStage) -> None:
        self._fleet = fleet
        self._names = names
        self._models = ModelCheck(fleet)
        self._edits = edits

    def routes(self) -> list[Route]:
        return [Route("/v1/messages/count_tokens", self.count, methods=["POST"])]

    async def count(self, request: Request) -> Response:
        """Count the prompt as it is edited, and where the request edits it also as it came."""
        asked = await read_parsed(request, partial(_parse, request.headers))
        said, tenant = asked.said, tenant_of(request)
        model = await self._names.resolve(said.model)
        await self._models.require(model)
        work = self._edits.edited_prompt(tenant, said.prompt, model, asked.edits, said.edits or ())
        made = await unless_disconnected(request.receive, work)
        desk = OnePromptDesk(self._fleet, tenant, model)
        tokens = original = await unless_disconnected(request.receive, desk.count(made.prompt))
        told: dict[str, Any] = {"input_tokens": tokens}
        if said.edits is not None:
            if made.prompt is not said.prompt:
                original = await unless_disconnected(request.receive, desk.count(said.prompt))
            told["context_management"] = {"original_input_tokens": original}
        return JSONResponse(told, headers=edit_headers(made.outcomes))


def _parse(headers: Mapping[str, str], body: dict[str, Any]) -> _Asked:
    fields = Fields(body)
    return _Asked(parse_prompt(fields, Notes()), edits_of(headers, fields))
