"""Which models there are, as the nodes say."""

from fabric.errors import NotFoundError, RetryLaterError
from router.fleet.fleet import Fleet
from router.fleet.node_discovery import AGAIN_S
from router.limits import NAME_CHARS_TOLD


class ModelCheck:
    """Judges models by what the nodes say, once they had their time to say it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def names(self) -> list[str]:
        """List the models, once every node had its time to name its own."""
        await self._fleet.discovery.wait(self._fleet.membership.has_contacted_all)
        return self._fleet.models()

    async def require(self, model: str) -> None:
        """Return if some node serves `model`; raise NotFoundError or RetryLaterError if none does.

        The clients of a router that died come back at once. Answered at once, too, they would
        rest for seconds, or believe that their model is gone.
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
            shown, missing_count = model[:NAME_CHARS_TOLD], fleet.discovery.missing_count
            if fleet.discovery.is_gathering():
                message = f"no node serves {shown!r} so far; {missing_count} are still missing"
                raise RetryLaterError(message, retry_after_s=AGAIN_S, code="nodes_unknown")
            message = f"model {shown!r} is not served here; available: {', '.join(names)}"
            raise NotFoundError(message, code="model_not_found", param="model")
