"""New identifiers: the only place where the router draws random numbers."""

import secrets

from fabric.ids import MigrationId, OperationId
from fabric.limits import EPOCH_MAX
from router.limits import EPOCH_GAP, EPOCH_GAP_BITS


def fresh_operation() -> OperationId:
    """Name one mutating call; a repeat of the call keeps the name."""
    return OperationId(f"op_{secrets.token_hex(12)}")


def fresh_migration() -> MigrationId:
    """Name one attempt to move one agent."""
    return MigrationId(f"mig_{secrets.token_hex(12)}")


def fresh_epoch_gap() -> int:
    """Choose how many epochs to leave to owners that no node has reported.

    Random, so that two routers which both had to leap give no epoch twice.
    """
    return EPOCH_GAP + secrets.randbits(EPOCH_GAP_BITS)


def first_epoch(life: int) -> int:
    """Return an epoch above every one that a router in an earlier life than `life` gave out."""
    return life << (EPOCH_GAP_BITS + 1)


def later_life(life: int) -> int:
    """Count one life more, but never so many that their epochs come near EPOCH_MAX."""
    return min(max(0, life) + 1, EPOCH_MAX >> (EPOCH_GAP_BITS + 2))


def fresh_event_key() -> bytes:
    """Draw the key under which one router names the fleet's events."""
    return secrets.token_bytes(32)


def fresh_name(prefix: str) -> str:
    """Name a completion, a tool call or a request for clients."""
    return f"{prefix}{secrets.token_hex(12)}"
