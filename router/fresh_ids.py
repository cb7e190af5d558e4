"""Fresh identifiers and epochs: the only place where the router draws random numbers."""

import secrets

from fabric.ids import MigrationId, OperationId, TurnId
from fabric.limits import EPOCH_MAX
from router.limits import EPOCH_GAP, EPOCH_GAP_BITS


def fresh_operation() -> OperationId:
    """Return a name for a mutating call; repeats of the call keep it."""
    return OperationId(f"op_{secrets.token_hex(12)}")


def fresh_migration() -> MigrationId:
    """Return a name for one attempt to move an agent."""
    return MigrationId(f"mig_{secrets.token_hex(12)}")


def fresh_epoch_gap() -> int:
    """Return a number of epochs to skip for owners that no node has reported.

    It is random, so that two routers with gaps do not give out the same epoch.
    """
    return EPOCH_GAP + secrets.randbits(EPOCH_GAP_BITS)


def first_epoch(life: int) -> int:
    """Return an epoch above all that routers gave out in lives before `life`."""
    return life << (EPOCH_GAP_BITS + 1)


def later_life(life: int) -> int:
    """Return the number of the next life, bounded so that its epochs stay below EPOCH_MAX."""
    return min(max(0, life) + 1, EPOCH_MAX >> (EPOCH_GAP_BITS + 2))


def fresh_event_key() -> bytes:
    """Return a random key for the ids of a router's events."""
    return secrets.token_bytes(32)


def fresh_turn() -> TurnId:
    """Return a name for one request and its turn."""
    return TurnId(fresh_name("req_"))


def fresh_name(prefix: str) -> str:
    """Return a random name for a completion, a tool call or a request."""
    return f"{prefix}{secrets.token_hex(12)}"
