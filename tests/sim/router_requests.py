"""Requests of operators and clients beside turns, handled in the router's process."""

import asyncio
from dataclasses import dataclass

from fabric.errors import FabricError, NotFoundError, RejectedError

REFUSALS = {404, 409, 421, 429, 503}
DISK_CODES = {"disk_error", "disk_budget", "undecided"}
DAMAGE_CODES = {"corrupt_data", "block_missing"}
ANSWER_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """The outcome of a request: its result or its error; neither if no reply arrived."""

    result: object = None
    error: FabricError | None = None
    is_over: bool = False


class RouterRequests:
    """Requests to the router, as operators and clients send them."""

    def __init__(self, world):
        self._world = world

    async def in_router(
        self, what, work, *, meets_damage=False, may_be_cut=False, allowed=frozenset()
    ):
        """Run a request in the router's process, as one of an operator would.

        `allowed` are codes with which this request may be rejected, besides the general ones.
        """
        world, router = self._world, self._world.router
        if router.services is None:
            return Outcome()
        world.note(what)
        services = router.services

        async def begin():
            return await work(services)  # may raise before anything can be awaited

        task = world.loop.spawn(router.process, begin())
        await asyncio.wait({task}, timeout=ANSWER_S)
        if not task.done() or task.cancelled():
            return Outcome()
        try:
            result = task.result()
        except FabricError as error:
            world.note(f"{what}: {error.status} {error.code}")
            is_fine = self._is_acceptable(error, meets_damage=meets_damage, may_be_cut=may_be_cut)
            if not (is_fine or error.code in allowed):
                world.fail(f"{what}: {error.status} {error.code}: {error.message}")
            return Outcome(None, error, is_over=True)
        world.note(f"{what}: done")
        return Outcome(result, None, is_over=True)

    def _is_acceptable(self, error, *, meets_damage, may_be_cut):
        hosts = self._world.nodes.values()
        if int(error.status) in REFUSALS or isinstance(error, NotFoundError):
            return True
        if may_be_cut and isinstance(error, RejectedError):
            return True  # the file ended early: its node died, or a block was damaged
        if error.code in DISK_CODES:
            # The node that reports it may have hung for a while.
            has_refused = any(h.drive.has_failed or h.drive.has_been_full for h in hosts)
            return has_refused or error.code == "disk_budget"
        return meets_damage and error.code in DAMAGE_CODES and any(h.drive.hurt for h in hosts)
