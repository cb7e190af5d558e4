"""Whether a turn's model is served here, also while a new router still meets its nodes."""

import asyncio

from fabric.errors import NotFoundError, RetryLaterError
from fabric.limits import LEASE_S
from router.fleet import Fleet

MEET_WAIT_S = LEASE_S  # after the router's start: by then, a node that is silent has no lease
MEET_POLL_S = 0.02


class ModelCheck:
    """Judges models by what the nodes say, once they had their time to say it."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._until_s = fleet.clock.monotonic_s() + MEET_WAIT_S

    async def require(self, model: str) -> None:
        """Return if some node serves `model`; raise NotFoundError or RetryLaterError if none does.

        The clients of a router that died come back at once. Answered at once, too, they would
        rest for seconds, or believe that their model is gone.
        """
        # No event to wait for: a lease also runs out by the clock alone.
        while model not in self._fleet.models() and self._may_come():  # noqa: ASYNC110
            await asyncio.sleep(MEET_POLL_S)
        names = self._fleet.models()
        if not names:
            message = "no node is ready yet"
            raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")
        if model not in names:
            message = f"model {model[:100]!r} is not served here; available: {', '.join(names)}"
            raise NotFoundError(message, code="model_not_found", param="model")

    def _may_come(self) -> bool:
        is_new = self._fleet.clock.monotonic_s() < self._until_s
        return is_new and not self._fleet.membership.has_met_all()
