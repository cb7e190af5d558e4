"""Models that the nodes serve."""

from fabric.errors import NotFoundError, RetryLaterError
from router.fleet.fleet import Fleet
from router.fleet.node_discovery import AGAIN_S
from router.limits import QUOTED_NAME_CHARS_MAX


class ModelCheck:
    """Checks of model names, after the nodes had time to report theirs."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def names(self) -> list[str]:
        """Return the models, after every node had time to report its own."""
        await self._fleet.discovery.wait(self._fleet.membership.has_contacted_all)
        return self._fleet.models()

    async def require(self, model: str) -> None:
        """Raise NotFoundError or RetryLaterError if no node serves `model`.

        Waits for the nodes first: the clients of a router that died reconnect at once, and must not
        get 404 for their model.
        """
        fleet = self._fleet
        await fleet.discovery.wait(
            lambda: model in fleet.models() or fleet.membership.has_contacted_all()
        )
        names = fleet.models()
        if not names:
            message = "no node is ready yet"
            raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")
        if model not in names:
            shown, missing_count = model[:QUOTED_NAME_CHARS_MAX], fleet.discovery.missing_count
            if fleet.discovery.is_gathering():
                message = f"no node serves {shown!r} so far; {missing_count} are still missing"
                raise RetryLaterError(message, retry_after_s=AGAIN_S, code="nodes_unknown")
            message = f"model {shown!r} is not served here; available: {', '.join(names)}"
            raise NotFoundError(message, code="model_not_found", param="model")
