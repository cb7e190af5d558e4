"""POST /v1/messages/count_tokens: the tokens of a prompt, by the model's own tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.hosting.http_server import unless_disconnected
from router.anthropic.content import Notes
from router.anthropic.request import PROMPT_BODY, RequestedPrompt, requested_prompt
from router.api.edit_fields import EditOptions, edits_of
from router.api.edit_stage import EditStage, PromptWorker, edit_headers
from router.api.models import ModelNames
from router.fleet.fleet import Fleet
from router.http.auth import tenant_of
from router.http.json_body import read_parsed
from router.http.turn_headers import ignored_header

COUNT_TOKENS_PATH: Final = "/v1/messages/count_tokens"


@dataclass(frozen=True, slots=True)
class _CountRequest:
    """A checked request."""

    model: str
    requested: RequestedPrompt
    edits: EditOptions
    ignored: tuple[str, ...]


class CountTokensApi:
    """Token counts of prompts, without a prefill."""

    def __init__(self, fleet: Fleet, names: ModelNames, edits: EditStage) -> None:
        self._fleet = fleet
        self._names = names
        self._edits = edits

    def routes(self) -> list[Route]:
        return [Route("/v1/messages/count_tokens", self.count, methods=["POST"])]

    async def count(self, request: Request) -> Response:
        """Count the prompt as edited and, if the request edits it, also as sent."""
        parsed = await read_parsed(request, partial(_parse, request.headers))
        requested, tenant = parsed.requested, tenant_of(request)
        model = await self._names.resolve(parsed.model)
        await self._fleet.discovery.require_model(model)
        work = self._edits.edited_prompt(
            tenant, requested.prompt, model, parsed.edits, requested.edits or ()
        )
        prompt, outcomes = await unless_disconnected(request.receive, work)
        worker = PromptWorker(self._fleet, tenant, model)
        tokens = original = await unless_disconnected(request.receive, worker.count(prompt))
        counts: dict[str, Any] = {"input_tokens": tokens}
        if requested.edits is not None:
            if prompt is not requested.prompt:
                original = await unless_disconnected(
                    request.receive, worker.count(requested.prompt)
                )
            counts["context_management"] = {"original_input_tokens": original}
        headers = edit_headers(outcomes) | ignored_header(parsed.ignored)
        return JSONResponse(counts, headers=headers)


def _parse(headers: Mapping[str, str], sent: dict[str, Any]) -> _CountRequest:
    body, notes = PROMPT_BODY.read(sent), Notes()
    requested, edits = requested_prompt(body, notes), edits_of(headers, sent)
    return _CountRequest(body.model, requested, edits, tuple(notes.ignored))
