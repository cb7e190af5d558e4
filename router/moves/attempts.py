"""What moves and copies do alike when an answer is missing, or an agent's owner is another one."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fabric.control.node_calls import Done
from fabric.errors import FabricError, RetryElsewhereError, RetryLaterError
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLink, NodeLostError

T = TypeVar("T")

_LOG = logging.getLogger("macfabric.router.moves")


def as_retry(error: RetryElsewhereError) -> FabricError:
    """Return what a client gets, which cannot choose the node: a request to try again.

    The error of a lost node is returned unchanged: `LostOwners.served` adds the agent and the time.
    """
    if isinstance(error, NodeLostError):
        return error
    return RetryLaterError(error.message, retry_after_s=2.0, code=error.code)


async def at_owner(fleet: Fleet, attempt: Callable[[], Awaitable[T]], *, relist: bool = False) -> T:
    """Make an attempt; where the directory was behind, learn owner and epoch anew, once.

    With `relist`, also from nodes whose lists have not changed since they were read.
    """
    try:
        return await attempt()
    except NodeLostError:
        raise
    except RetryElsewhereError:
        await fleet.membership.refresh(relist=relist)
        return await attempt()


async def told(link: NodeLink, message: object) -> bool:
    """Make a call that may be lost; say whether it was answered."""
    try:
        await link.call(message, Done)
    except RetryElsewhereError:
        return False
    except FabricError as error:
        _LOG.warning("node %s: %s", link.name, error.code)
        return False
    return True
