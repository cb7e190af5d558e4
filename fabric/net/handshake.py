"""Handshake by which two nodes prove that they hold the cluster's key, and derive session keys.

All of it covers the whole transcript: both names and nonces, the model, and whether the rest is
encrypted. Both ends detect any change of it in transit.
"""

import hmac
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Final

from fabric import PROTOCOL_VERSION
from fabric.codec import pack
from fabric.errors import UnauthorizedError
from fabric.net.wire import PROOF_BYTES, Hello

SESSION_KEY_BYTES: Final = 32


class HandshakeRole(StrEnum):
    """End of a connection that proves itself; prevents reflection of a proof."""

    CLIENT = "client"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class _Transcript:
    role: HandshakeRole
    version: int
    hello: Hello
    server_nonce: bytes
    encrypts: bool


def prove(
    cluster_key: bytes,
    role: HandshakeRole,
    hello: Hello,
    server_nonce: bytes,
    *,
    encrypts: bool = False,
) -> bytes:
    """Prove knowledge of the cluster key over both nonces, both names, the role, the agreement."""
    transcript = pack(_Transcript(role, PROTOCOL_VERSION, hello, server_nonce, encrypts))
    tag = blake2b(transcript, digest_size=PROOF_BYTES, key=cluster_key, person=b"mf-wire-v1")
    return tag.digest()


def check_proof(
    cluster_key: bytes,
    role: HandshakeRole,
    hello: Hello,
    server_nonce: bytes,
    proof: bytes,
    *,
    encrypts: bool = False,
) -> None:
    """Raise UnauthorizedError unless `proof` is that of the peer in `role`."""
    right = prove(cluster_key, role, hello, server_nonce, encrypts=encrypts)
    if not hmac.compare_digest(proof, right):
        message = f"the {role} does not hold this cluster's key"
        raise UnauthorizedError(message, code="bad_key")


@dataclass(frozen=True, slots=True)
class SessionKeys:
    """Keys that authenticate one connection after its handshake, by sender."""

    client: bytes
    server: bytes


def session_keys(
    cluster_key: bytes, hello: Hello, server_nonce: bytes, *, encrypts: bool = False
) -> SessionKeys:
    """Derive a connection's keys; both nonces are in them, so no two connections share one."""

    def derive(role: HandshakeRole) -> bytes:
        transcript = pack(_Transcript(role, PROTOCOL_VERSION, hello, server_nonce, encrypts))
        size, person = SESSION_KEY_BYTES, b"mf-session-v1"
        return blake2b(transcript, digest_size=size, key=cluster_key, person=person).digest()

    return SessionKeys(derive(HandshakeRole.CLIENT), derive(HandshakeRole.SERVER))
