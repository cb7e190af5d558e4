"""Keys of a fabric: clients' keys as settings spell them, the nodes' secret, and the files of both.

Only digests are kept and compared, so the time of a comparison reveals nothing of a key.
"""

import hmac
import re
from collections.abc import Mapping
from hashlib import blake2b, sha256
from typing import Final

from fabric.errors import RejectedError

OPERATOR_HEADER = "x-macfabric-operator-key"
KEY_CHARS_MIN = 16
DIGEST_PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


def key_digest(spelled: str) -> bytes:
    """Return the digest of a key as settings spell it; raise RejectedError if it is not a key."""
    if spelled.lower().startswith(DIGEST_PREFIX):
        match = _DIGEST.fullmatch(spelled)
        if match is None:
            message = (
                f"{DIGEST_PREFIX} must be followed by the 64 hexadecimal digits of a key's digest"
            )
            raise RejectedError(message, code="invalid_settings")
        return bytes.fromhex(match[1])
    if len(spelled) < KEY_CHARS_MIN:
        message = f"a key must have at least {KEY_CHARS_MIN} characters"
        raise RejectedError(message, code="invalid_settings")
    return sha256(spelled.encode()).digest()


def is_plain(spelled: str) -> bool:
    """Return whether the settings contain the key itself."""
    return not spelled.lower().startswith(DIGEST_PREFIX)


def find_key_owner(given: bytes, digests: Mapping[str, bytes]) -> str | None:
    """Return the name of a key's owner, or None, in constant time."""
    owner, digest = None, sha256(given).digest()
    for name, expected_digest in digests.items():
        if hmac.compare_digest(digest, expected_digest):
            owner = name
    return owner


def http_secret(cluster_key: bytes) -> str:
    """Derive the value of the cluster header, so that the key itself never travels."""
    return blake2b(digest_size=32, key=cluster_key, person=b"mf-http").hexdigest()


def has_cluster_secret(header: str, cluster_key: bytes) -> bool:
    """Return whether a cluster header has this fabric's secret, in constant time."""
    return hmac.compare_digest(header.encode(), http_secret(cluster_key).encode())


CLUSTER_KEY: Final = "cluster.key"  # 32 bytes in hex; salts, tickets and stored caches depend on it
AUTHORITY_CERTIFICATE: Final = "ca.pem"  # the authority that members trust, and clients may
MEMBER_CERTIFICATE: Final = "member.pem"
MEMBER_KEY: Final = "member.key"
RAY_TOKEN: Final = "ray.token"  # noqa: S105 - a file's name
SHIPPED_KEYS: Final = "~/macfabric/keys"  # where cluster.yaml has them put on every Mac
CLUSTER_FILE_KEYS: Final = "~/.macfabric/cluster/keys"  # where they are made, before `ray up`
KEYS_DIGEST_BYTES: Final = 16

# In every member's certificate. Clients verify a node by this name, since its address changes.
MEMBER_NAME: Final = "member.macfabric.internal"
