"""New identifiers: the only place where the router draws random numbers."""

import secrets

from fabric.ids import MigrationId, OperationId


def fresh_operation() -> OperationId:
    """Name one mutating call; a repeat of the call keeps the name."""
    return OperationId(f"op_{secrets.token_hex(12)}")


def fresh_migration() -> MigrationId:
    """Name one attempt to move one agent."""
    return MigrationId(f"mig_{secrets.token_hex(12)}")


def fresh_name(prefix: str) -> str:
    """Name a completion, a tool call or a request for clients."""
    return f"{prefix}{secrets.token_hex(12)}"
