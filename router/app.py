"""The router's ASGI application: routes behind the error boundary, the keys and the limits."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from fabric.errors import FabricError
from fabric.settings import RouterSettings
from router.admin.agents import AgentsApi
from router.admin.copies import CopiesApi
from router.admin.drain import DrainApi
from router.admin.health import HealthApi
from router.admin.hibernation import HibernationApi
from router.admin.metrics import MetricsApi
from router.admin.nodes import NodesApi
from router.admin.waiting import waiting
from router.http.auth import Auth
from router.http.body_limit import BodyLimit
from router.http.errors import ErrorBoundary, on_fabric_error, on_http_error
from router.moves.hibernations import Hibernations
from router.openai.chat_api import ChatApi
from router.openai.completion_api import CompletionApi
from router.openai.models_api import ModelsApi
from router.services import Services


def routes_of(services: Services) -> list[BaseRoute]:
    """Collect the routes of all APIs."""
    fleet, clock = services.fleet, services.fleet.clock
    named = [  # these name agents or nodes
        *AgentsApi(fleet, services.migrations, services.erasures).routes(),
        *HibernationApi(Hibernations(fleet, services.migrations)).routes(),
        *CopiesApi(services.forks, services.replicas, services.prefetches).routes(),
        *NodesApi(fleet, services.drains).routes(),
        *DrainApi(fleet, services.drains).routes(),
    ]
    return [
        *HealthApi(fleet).routes(),
        *ChatApi(services.turns, clock).routes(),
        *CompletionApi(services.turns, clock).routes(),
        *ModelsApi(fleet).routes(),
        *waiting(named, fleet.meeting),
        *MetricsApi(fleet, services.telemetry).routes(),
    ]


def build_app(settings: RouterSettings, services: Services) -> Starlette:
    """Build the application; whoever owns `services` runs their background work."""
    app = Starlette(
        routes=routes_of(services),
        middleware=[
            Middleware(ErrorBoundary),
            Middleware(Auth, settings=settings),
            Middleware(BodyLimit, prompt_bytes_max=services.fleet.prompt_bytes_max),
        ],
        exception_handlers={
            FabricError: on_fabric_error,
            HTTPException: on_http_error,
        },
    )
    # A redirect would drop the body of a POST; a wrong path is a 404 in our own shape.
    app.router.redirect_slashes = False
    return app
