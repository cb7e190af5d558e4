"""Identifiers of the fabric, and the only functions that turn outside text into them."""

import re
from hashlib import blake2b
from typing import NewType, TypeAlias

from fabric.errors import RejectedError

AgentId = NewType("AgentId", str)
NodeName = NewType("NodeName", str)
TenantId = NewType("TenantId", str)
MigrationId = NewType("MigrationId", str)
OperationId = NewType("OperationId", str)
TurnId = NewType("TurnId", str)
Traceparent = NewType("Traceparent", str)  # a span as W3C's header names it
BlockHash = NewType("BlockHash", bytes)
Checksum = NewType("Checksum", bytes)
Fingerprint = NewType("Fingerprint", bytes)

AgentKey: TypeAlias = tuple[TenantId, AgentId]  # identifies an agent throughout a fabric

DEFAULT_TENANT = TenantId("default")
SELF_TEST_TENANT = TenantId("_selftest")  # each node's own, erased at once
BLOCK_HASH_BYTES = 32
CHECKSUM_BYTES = 16
FINGERPRINT_BYTES = 32

# '~' separates a group's name from the suffix of one of its conversations, so `agent_id_from_key`
# never produces it. Clients may use it in an agent's name, since nodes report such names to them.
_AGENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+=~-]{0,127}", re.ASCII)
_NODE = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)
_TENANT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}", re.ASCII)
_OPERATION = re.compile(r"[A-Za-z0-9_-]{8,64}", re.ASCII)
_TURN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{7,63}", re.ASCII)
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)


def _parse(pattern: re.Pattern[str], text: object, what: str, rule: str) -> str:
    if isinstance(text, str) and pattern.fullmatch(text):
        return text
    message = f"{what} must be {rule}"
    raise RejectedError(message, code=f"invalid_{what.replace(' ', '_')}")


def parse_agent_id(text: object) -> AgentId:
    """Return `text` as an agent id; raise RejectedError where it is not one."""
    rule = "1-128 characters of A-Z a-z 0-9 . _ : @ + = ~ - and start with a letter or digit"
    return AgentId(_parse(_AGENT, text, "agent id", rule))


def parse_node_name(text: object) -> NodeName:
    """Return `text` as a node name; raise RejectedError where it is not one."""
    rule = "1-63 characters of a-z 0-9 - and start with a letter or digit"
    return NodeName(_parse(_NODE, text, "node name", rule))


def parse_tenant_id(text: object) -> TenantId:
    """Return `text` as a tenant id; raise RejectedError where it is not one."""
    rule = "1-63 characters of A-Z a-z 0-9 _ . -"
    return TenantId(_parse(_TENANT, text, "tenant id", rule))


def parse_operation_id(text: object) -> OperationId:
    """Return `text` as an operation id; raise RejectedError where it is not one."""
    rule = "8-64 characters of A-Z a-z 0-9 _ -"
    return OperationId(_parse(_OPERATION, text, "operation id", rule))


def parse_turn_id(text: object) -> TurnId:
    """Return `text` as a turn's id; raise RejectedError where it is not one."""
    rule = "8-64 characters of A-Z a-z 0-9 . _ : - and start with a letter or digit"
    return TurnId(_parse(_TURN, text, "turn id", rule))


def parse_traceparent(text: object) -> Traceparent:
    """Return `text` as a span's name; raise RejectedError where it is not one."""
    rule = "version 00 of https://www.w3.org/TR/trace-context: 00-TRACE-SPAN-FLAGS"
    return Traceparent(_parse(_TRACEPARENT, text, "traceparent", rule))


def _digest(raw: object, size_bytes: int, what: str) -> bytes:
    if isinstance(raw, bytes) and len(raw) == size_bytes:
        return raw
    message = f"{what} must be {size_bytes} bytes"
    raise RejectedError(message, code=f"invalid_{what.replace(' ', '_')}")


def parse_block_hash(raw: object) -> BlockHash:
    """Return 32 bytes as a block hash; raise RejectedError otherwise."""
    return BlockHash(_digest(raw, BLOCK_HASH_BYTES, "block hash"))


def parse_checksum(raw: object) -> Checksum:
    """Return 16 bytes as a payload checksum; raise RejectedError otherwise."""
    return Checksum(_digest(raw, CHECKSUM_BYTES, "checksum"))


def parse_fingerprint(raw: object) -> Fingerprint:
    """Return 32 bytes as a model fingerprint; raise RejectedError otherwise."""
    return Fingerprint(_digest(raw, FINGERPRINT_BYTES, "fingerprint"))


def agent_id_from_key(key: str) -> AgentId:
    """Return an agent's name for a client's cache key or user, digested if it is no agent id."""
    if _AGENT.fullmatch(key) and "~" not in key:
        return AgentId(key)
    return AgentId("key-" + blake2b(key.encode("utf-8", "replace"), digest_size=10).hexdigest())
