"""POST /v1/responses/input_tokens: the tokens of a response's prompt, without a prefill."""

from functools import partial
from typing import Final, NoReturn

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.errors import NotFoundError
from fabric.hosting.http_server import unless_disconnected
from router.api.edit_stage import EditStage, PromptWorker, edit_headers
from router.api.models import ModelNames
from router.api.turn_route import parsed_request
from router.fleet.fleet import Fleet
from router.http.auth import tenant_of
from router.http.json_body import read_parsed
from router.http.turn_headers import ignored_header
from router.openai.responses.adapter import ResponsesAdapter

INPUT_TOKENS_PATH: Final = "/v1/responses/input_tokens"
COMPACT_PATH: Final = "/v1/responses/compact"


class InputTokensApi:
    """Token counts of the prompts that responses would have."""

    def __init__(
        self, fleet: Fleet, names: ModelNames, edits: EditStage, adapter: ResponsesAdapter
    ) -> None:
        self._fleet = fleet
        self._names = names
        self._edits = edits
        self._adapter = adapter

    def routes(self) -> list[Route]:
        return [
            Route(INPUT_TOKENS_PATH, self.count, methods=["POST"]),
            Route(COMPACT_PATH, self.compact, methods=["POST"]),
        ]

    async def count(self, request: Request) -> Response:
        """Count the prompt of the same body as a response's, as edited."""
        parse = partial(parsed_request, self._adapter, request.headers)
        sent, tenant = await read_parsed(request, parse), tenant_of(request)
        parsed = await self._adapter.with_history(tenant, sent)
        model = await self._names.resolve(parsed.model)
        await self._fleet.discovery.require_model(model)
        edited = await unless_disconnected(
            request.receive, self._edits.edited(tenant, parsed, model)
        )
        count = PromptWorker(self._fleet, tenant, model).count(edited.prompt)
        tokens = await unless_disconnected(request.receive, count)
        headers = edit_headers(edited.outcomes) | ignored_header(edited.ignored)
        body = {"object": "response.input_tokens", "input_tokens": tokens}
        return JSONResponse(body, headers=headers)

    async def compact(self, _request: Request) -> NoReturn:
        message = (
            "responses are not compacted here; set truncation to 'auto', or use policies, to "
            "shorten a conversation"
        )
        raise NotFoundError(message, code="unknown_url")
