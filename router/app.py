"""ASGI application of the router: routes, error boundary, authentication and limits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from fabric.edit_mode import EDIT_MODES, EXACT
from fabric.ports import Clock
from fabric.settings import RouterSettings
from router.admin import description as of_admin
from router.admin.agent_settings import AgentSettingsApi
from router.admin.agents import AgentsApi
from router.admin.copies import CopiesApi
from router.admin.decisions import DecisionsApi
from router.admin.directives import DirectivesApi
from router.admin.events import EventsApi
from router.admin.generate import GenerateApi
from router.admin.hibernation import HibernationApi
from router.admin.monitoring import HealthApi, MetricsApi
from router.admin.nodes import NodesApi
from router.admin.router import RouterApi
from router.admin.turns import TurnsApi
from router.admin.usage import UsageApi
from router.admin.views.events import Snapshots
from router.admin.waiting import waiting
from router.anthropic import description as of_anthropic
from router.anthropic.count_tokens_api import COUNT_TOKENS_PATH, CountTokensApi
from router.anthropic.dialect import AnthropicErrors, AnthropicModels
from router.anthropic.messages_adapter import MessagesAdapter
from router.api import openapi
from router.api.adapter import ApiAdapter
from router.api.edit_stage import EditStage
from router.api.models import ModelNames, ModelsApi
from router.api.openapi import ref
from router.api.probes import PlainErrors, probe_routes
from router.api.turn_route import TurnServices, turn_routes
from router.dashboard.pages import Pages, read_files
from router.http.auth import Auth
from router.http.body_limit import BodyLimit
from router.http.cors import Cors
from router.http.counted import CountedAnswers
from router.http.errors import Dialects, ErrorBoundary, ErrorDialect, error_handlers
from router.http.standby_gate import Relay, StandbyGate
from router.limits import SCENARIO_REQUEST_BYTES_MAX
from router.moves.hibernations import Hibernations
from router.openai import description as of_openai
from router.openai.chat_adapter import ChatAdapter
from router.openai.completion_adapter import CompletionAdapter
from router.openai.models import OpenAiModels
from router.openai.responses import description as of_responses
from router.openai.responses.adapter import ResponsesAdapter
from router.openai.responses.input_tokens import INPUT_TOKENS_PATH, InputTokensApi
from router.openai.responses.store import ResponseStore, Settle, StoredApi
from router.openai.shape import OpenAiErrors
from router.policies.editing import Editing
from router.restart import RestartRequest
from router.runs import description as of_runs
from router.runs.in_process import InProcessHost
from router.runs.routes import PATH as RUNS_PATH
from router.runs.routes import RunsApi
from router.runs.run_folders import RunFolders
from router.runs.runs import Runs
from router.services import Services
from router.shadow.change_log import ChangeLog
from router.shadow.exchange import ChangesApi, Follower
from router.shadow.run_files import RunFiles

_ANTHROPIC: Final = "anthropic-version"  # a header that its clients send
_OLLAMA: Final = "/api"  # path of its clients' requests, none of which are served


def describe_api() -> dict[str, Any]:
    """Return the OpenAPI document of all routes."""
    rooms = (of_openai, of_responses, of_anthropic, of_admin, of_runs)
    error = {"anyOf": [ref("OpenAiError"), ref("AnthropicError")]}
    schemas = {name: schema for room in rooms for name, schema in room.SCHEMAS.items()}
    operations = [operation for room in rooms for operation in room.DESCRIBED]
    return openapi.document([*operations, openapi.DESCRIBED], schemas | {"Error": error})


def adapters_of(clock: Clock, responses: ResponsesAdapter) -> list[ApiAdapter[Any]]:
    """Return the APIs that run turns."""
    return [
        ChatAdapter(clock),
        CompletionAdapter(clock),
        MessagesAdapter(),
        responses,
    ]


def turn_services_of(settings: RouterSettings, services: Services) -> TurnServices:
    """Return the services that all turns use."""
    fleet = services.fleet
    names = ModelNames(fleet, settings.model_aliases)
    mode = EDIT_MODES[settings.edits] if settings.edits != EXACT else None
    edits = EditStage(fleet, Editing(settings.policies), mode, settings.truncation)
    return TurnServices(services.turns, names, settings.completion_tokens_max, edits)


def routes_of(
    services: Services,
    turn_services: TurnServices,
    adapters: Sequence[ApiAdapter[Any]],
    responses: ResponsesAdapter,
    stored: ResponseStore,
    runs: Runs,
    settle: Settle,
    restart: RestartRequest | None,
) -> list[BaseRoute]:
    """Return the routes of all APIs."""
    fleet, names, edits = services.fleet, turn_services.names, turn_services.edits
    snapshots = Snapshots(fleet, services.drains, services.moves)
    named = [  # these name agents or nodes
        *AgentsApi(fleet, services.moves, services.erasures, runs).routes(),
        *TurnsApi(fleet).routes(),
        *DirectivesApi(fleet, services.propagation, fleet.clock).routes(),
        *AgentSettingsApi(fleet, services.propagation, fleet.clock).routes(),
        *HibernationApi(Hibernations(fleet, services.moves)).routes(),
        *CopiesApi(services.forks, services.replicas, services.prefetches).routes(),
        *NodesApi(fleet, services.drains).routes(),
        *GenerateApi(fleet, turn_services, OpenAiErrors()).routes(),
        *EventsApi(fleet.events, snapshots, OpenAiErrors()).routes(),
    ]
    return [
        *HealthApi(fleet, services.turns.running).routes(),
        *RouterApi(fleet, services.terms, restart).routes(),
        *probe_routes(),
        *turn_routes(adapters, turn_services),
        *CountTokensApi(fleet, names, edits).routes(),
        *ModelsApi(
            fleet,
            names,
            OpenAiModels(),
            {_ANTHROPIC: AnthropicModels()},
            turn_services.completion_tokens_max,
        ).routes(),
        *InputTokensApi(fleet, names, edits, responses).routes(),
        *StoredApi(stored, settle).routes(),
        *RunsApi(runs, OpenAiErrors()).routes(),
        *openapi.openapi_routes(describe_api()),
        *waiting(named, fleet.discovery, services.lost_owners),
        *MetricsApi(fleet, services.telemetry, services.terms).routes(),
        *DecisionsApi(services.turns.decisions, fleet).routes(),
        *UsageApi(services.turns.accounts).routes(),
    ]


def build_app(
    settings: RouterSettings,
    services: Services,
    runs_dir: Path | None = None,
    relay: Relay | None = None,
    watch_key: str | None = None,
    restart: RestartRequest | None = None,
) -> Starlette:
    """Build the application; the owner of `services` runs their background work.

    The owner also resumes and closes `state.runs`; without `runs_dir`, there are no runs.
    The `watch_key` opens metrics, nodes and events only.
    With a `relay`, requests are forwarded while another router is the active one. Without a
    `restart`, operators cannot restart this process.
    """
    log = ChangeLog(services.fleet.clock.monotonic_s)
    stored = ResponseStore(services.fleet.directory.floor, log.note, log.note_gone)
    services.erasures.subscribe(stored.forget)
    responses = ResponsesAdapter(services.fleet.clock, stored, log.settle)
    adapters = adapters_of(services.fleet.clock, responses)
    turn_services = turn_services_of(settings, services)
    host = InProcessHost(settings, services, turn_services)
    files = None if runs_dir is None else RunFiles(runs_dir)

    async def share_runs() -> None:
        log.note()
        await log.settle()

    runs = Runs(None if runs_dir is None else RunFolders(runs_dir), host, share_runs)
    shadowed: list[BaseRoute] = []
    if relay is not None:
        shadowed = [*ChangesApi(log, stored, files, relay.is_active).routes()]
    by_path = {adapter.path: adapter for adapter in adapters}
    by_prefix: dict[str, ErrorDialect] = {**by_path, _OLLAMA: PlainErrors()}
    dialects = Dialects(OpenAiErrors(), by_prefix, {_ANTHROPIC: AnthropicErrors()})
    routes = [
        *shadowed,
        *routes_of(services, turn_services, adapters, responses, stored, runs, log.settle, restart),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(CountedAnswers, routes=routes, count=services.telemetry.note_response),
            Middleware(Cors, origins=settings.cors_origins),
            Middleware(ErrorBoundary, dialects=dialects),
            Middleware(Pages, files=read_files()),
            Middleware(
                Auth,
                settings=settings,
                forwarding=relay.forwarding if relay else None,
                watch_key=watch_key,
            ),
            Middleware(StandbyGate, relay=relay),
            Middleware(
                BodyLimit,
                prompt_paths={*by_path, COUNT_TOKENS_PATH, INPUT_TOKENS_PATH},
                prompt_bytes_max=services.fleet.prompt_bytes_max,
                call_bytes_max={RUNS_PATH: SCENARIO_REQUEST_BYTES_MAX},
                retry_after_s=services.turns.queues.retry_after_s,
            ),
        ],
        exception_handlers=error_handlers(dialects),
    )
    # A redirect would drop the body of a POST; a wrong path gets a 404 in the API's own shape.
    app.router.redirect_slashes = False
    app.state.runs = runs
    app.state.log, app.state.stored = log, stored
    app.state.follower = Follower(relay, stored, files) if relay is not None else None
    return app
