"""Retries of node calls when the directory is stale or an answer is lost."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fabric.control.node_calls import Done
from fabric.errors import FabricError, RetryElsewhereError, RetryLaterError
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLink, NodeLostError

T = TypeVar("T")

_LOG = logging.getLogger("macfabric.router.moves")


def as_client_error(error: RetryElsewhereError) -> FabricError:
    """Convert an error for a client, which cannot choose another node, to one that may be retried.

    Returns a lost node's error unchanged; `LostOwners.calling_owner` adds the agent and the time.
    """
    if isinstance(error, NodeLostError):
        return error
    return RetryLaterError(error.message, retry_after_s=2.0, code=error.code)


async def with_fresh_owner(
    fleet: Fleet, attempt: Callable[[], Awaitable[T]], *, relist: bool = False
) -> T:
    """Make an attempt; if the directory was stale, refresh it and try once more.

    With `relist`, also reread the lists of nodes that report no change.
    """
    try:
        return await attempt()
    except NodeLostError:
        raise
    except RetryElsewhereError:
        await fleet.membership.refresh(relist=relist)
        return await attempt()


async def best_effort_call(link: NodeLink, message: object) -> bool:
    """Make a call whose failure is ignored; return whether it succeeded."""
    try:
        await link.call(message, Done)
    except RetryElsewhereError:
        return False
    except FabricError as error:
        _LOG.warning("node %s failed a call: %s", link.name, error.code)
        return False
    return True
