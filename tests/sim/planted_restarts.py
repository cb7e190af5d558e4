"""Planted faults in restarts."""

from unittest import mock

from router.fleet.expected_nodes import ExpectedNodes, MissingNodes
from router.fleet.roster_keeper import RosterKeeper
from router.turns.owner_wait import OwnerWait
from tests.sim.replaced import replaced


def turns_do_not_wait_for_their_owner():
    """A new router serves an unreported agent on any ready node."""

    async def wait(self, *_):
        return None

    return replaced(OwnerWait, "wait", wait)


def missing_nodes_are_not_expected():
    """A new router assumes that the nodes Ray lists at its start are all nodes."""
    return mock.patch.object(ExpectedNodes, "missing", return_value=MissingNodes())


def the_stored_roster_is_not_read():
    """A new router expects only the number of nodes in its configuration, if any."""
    return mock.patch.object(RosterKeeper, "_expect", return_value=None)


RESTART_PLANTS = (
    turns_do_not_wait_for_their_owner,
    missing_nodes_are_not_expected,
    the_stored_roster_is_not_read,
)
