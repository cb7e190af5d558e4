"""The router's ASGI application: routes behind the error boundary, the keys and the limits."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import BaseRoute

from fabric.errors import FabricError
from fabric.settings import RouterSettings
from router.agents_api import AgentsApi
from router.api_errors import ErrorBoundary, on_fabric_error, on_http_error
from router.auth import Auth
from router.body_limit import BodyLimit
from router.chat_api import ChatApi
from router.completion_api import CompletionApi
from router.copies_api import CopiesApi
from router.drain_api import DrainApi
from router.health_api import HealthApi
from router.hibernation_api import HibernationApi
from router.hibernations import Hibernations
from router.metrics_api import MetricsApi
from router.models_api import ModelsApi
from router.nodes_api import NodesApi
from router.services import Services


def routes_of(services: Services) -> list[BaseRoute]:
    """Collect the routes of all APIs."""
    fleet, clock = services.fleet, services.fleet.clock
    return [
        *HealthApi(fleet).routes(),
        *ChatApi(services.turns, clock).routes(),
        *CompletionApi(services.turns, clock).routes(),
        *ModelsApi(fleet).routes(),
        *AgentsApi(fleet, services.migrations, services.erasures).routes(),
        *HibernationApi(Hibernations(fleet, services.migrations)).routes(),
        *CopiesApi(services.forks, services.replicas, services.prefetches).routes(),
        *NodesApi(fleet, services.drains).routes(),
        *DrainApi(fleet, services.drains).routes(),
        *MetricsApi(fleet, services.telemetry).routes(),
    ]


def build_app(settings: RouterSettings, services: Services) -> Starlette:
    """Build the application; whoever owns `services` runs their background work."""
    app = Starlette(
        routes=routes_of(services),
        middleware=[
            Middleware(ErrorBoundary),
            Middleware(Auth, settings=settings),
            Middleware(BodyLimit),
        ],
        exception_handlers={
            FabricError: on_fabric_error,
            HTTPException: on_http_error,
        },
    )
    # A redirect would drop the body of a POST; a wrong path is a 404 in our own shape.
    app.router.redirect_slashes = False
    return app
