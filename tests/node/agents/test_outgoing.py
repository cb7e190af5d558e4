"""An outgoing move: offered, sealed, aborted, released."""

import asyncio

import pytest

from fabric.control.node_calls import SealAgent
from fabric.ids import AgentId, MigrationId, NodeName, TenantId
from node.agents.outgoing import OutgoingMove, OutgoingState, Successor

MOVE = MigrationId("mig-1")
SEAL = SealAgent(TenantId("default"), AgentId("alice"), 1, MOVE, NodeName("b"))


def is_decided(move):
    async def wait_briefly():
        return await asyncio.wait_for(move.wait_until_decided(), 0.01)

    try:
        asyncio.run(wait_briefly())
    except TimeoutError:
        return False
    return True


def test_requested_move_ends_turn_with_seal():
    move = OutgoingMove()
    move.ask(SEAL)
    assert move.state is OutgoingState.ASKED
    assert move.is_asked(MOVE)
    assert not move.is_asked(MigrationId("another"))
    assert move.begin_sealing() is SEAL
    move.note_sealed()
    assert move.stop_asking() == MOVE
    assert (move.state, move.seal) == (OutgoingState.SEALED, None)


@pytest.mark.parametrize("is_saving", [False, True])
def test_turn_ending_without_seal_keeps_agent_here(is_saving):
    move = OutgoingMove()
    move.ask(SEAL)
    if is_saving:
        move.begin_sealing()  # the disk refuses the save
    assert move.stop_asking() == MOVE
    assert (move.state, move.begin_sealing(), move.stop_asking()) == (
        OutgoingState.HERE,
        None,
        None,
    )


def test_turns_wait_only_while_move_is_sealed():
    assert not is_decided(OutgoingMove(OutgoingState.SEALED)), "the state after a restart"
    for end in (OutgoingMove.note_owned_here, lambda move: move.note_owned_elsewhere(2)):
        move = OutgoingMove()
        assert is_decided(move)
        move.note_sealed()
        assert not is_decided(move)
        end(move)
        assert is_decided(move)


def test_fence_is_never_lowered():
    move = OutgoingMove()
    move.note_owned_elsewhere(5)
    move.note_owned_elsewhere(3)
    move.note_owned_here()
    assert (move.state, move.fence) == (OutgoingState.HERE, 5)


def test_successor_of_highest_epoch_is_kept_until_erasure():
    move, latest = OutgoingMove(), Successor(NodeName("c"), 5)
    move.note_successor(latest)
    move.note_successor(Successor(NodeName("b"), 3))
    assert (move.state, move.fence, move.successor) == (OutgoingState.LEFT, 5, latest)
    move.note_erased(8)
    assert (move.fence, move.successor) == (9, None)


def test_move_request_for_departed_agent_is_ignored():
    move = OutgoingMove()
    move.note_owned_elsewhere(2)
    move.ask(SEAL)
    assert move.state is OutgoingState.LEFT
    assert move.stop_asking() == MOVE, "a turn may still wait for the move"
