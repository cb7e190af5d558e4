"""Requests that a standby router forwards, with a proof of the caller that it authenticated.

So keys that only the standby's Mac has, and programs there that need none, work as at the active
router. The proof needs the cluster's key and holds for one method, path and caller.
"""

import base64
import hmac
import json
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from fabric.errors import UnauthorizedError
from fabric.ids import TenantId

CALLER_HEADER: Final = "x-macfabric-caller"
PROOF_HEADER: Final = "x-macfabric-caller-proof"
_DIGEST_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Principal:
    """Caller of a request: a tenant, an operator, or neither on an open path."""

    tenant: TenantId | None = None
    operator: str | None = None  # the name of the key
    only_watches: bool = False  # an operator whose key opens metrics, nodes and events alone

    @property
    def owner(self) -> str:
        """Account that the request's slots and bytes count against; no tenant has a space."""
        return self.tenant or (f"operator {self.operator}" if self.operator else "a stranger")


def target_of(scope: Scope) -> str:
    """Return a request's path and query as they were sent."""
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    query = scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


@dataclass(frozen=True, slots=True)
class Forwarding:
    """Proofs of callers between the routers of one fabric."""

    cluster_key: bytes = field(repr=False)

    def headers(self, caller: Principal, method: str, target: str) -> dict[str, str]:
        """Return the headers that prove a caller to another router."""
        watches = [True] if caller.only_watches else []  # absent for routers of earlier versions
        spelled = json.dumps([caller.tenant, caller.operator, *watches]).encode()
        encoded_caller = base64.urlsafe_b64encode(spelled).decode()
        return {
            CALLER_HEADER: encoded_caller,
            PROOF_HEADER: self._proof(encoded_caller, method, target),
        }

    def caller(self, scope: Scope, headers: Headers) -> Principal | None:
        """Return the caller that a router proves; None if the request comes from a client.

        Raises UnauthorizedError for a false proof.
        """
        encoded_caller = headers.get(CALLER_HEADER)
        if encoded_caller is None:
            return None
        proof = self._proof(encoded_caller, scope["method"], target_of(scope))
        if not hmac.compare_digest(proof.encode(), headers.get(PROOF_HEADER, "").encode()):
            message = f"only a router of this fabric may send {CALLER_HEADER}"
            raise UnauthorizedError(message)
        tenant, operator, *watches = json.loads(base64.urlsafe_b64decode(encoded_caller))
        return Principal(tenant, operator, bool(watches and watches[0]))

    def _proof(self, encoded_caller: str, method: str, target: str) -> str:
        digest = blake2b(digest_size=_DIGEST_BYTES, key=self.cluster_key, person=b"mf-forwarded")
        for part in (method, target, encoded_caller):
            encoded = part.encode("latin-1", "replace")
            digest.update(len(encoded).to_bytes(4, "big") + encoded)
        return digest.hexdigest()
