"""Keys as settings spell them: the key itself, or `sha256:` and the digest of it in hex.

Only digests are kept and compared, so the time of a comparison reveals nothing of a key.
"""

import hmac
import re
from collections.abc import Mapping
from hashlib import sha256

from fabric.errors import RejectedError

OPERATOR_HEADER = "x-macfabric-operator-key"
KEY_CHARS_MIN = 16
DIGEST_PREFIX = "sha256:"
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


def key_digest(spelled: str) -> bytes:
    """Return the digest of a key as settings spell it; raise RejectedError if it is not a key."""
    if spelled.lower().startswith(DIGEST_PREFIX):
        found = _DIGEST.fullmatch(spelled)
        if found is None:
            message = f"{DIGEST_PREFIX} is followed by the 64 hexadecimal digits of a key's digest"
            raise RejectedError(message, code="invalid_settings")
        return bytes.fromhex(found[1])
    if len(spelled) < KEY_CHARS_MIN:
        message = f"a key has at least {KEY_CHARS_MIN} characters"
        raise RejectedError(message, code="invalid_settings")
    return sha256(spelled.encode()).digest()


def is_plain(spelled: str) -> bool:
    """Return whether the settings contain the key itself."""
    return not spelled.lower().startswith(DIGEST_PREFIX)


def name_of(given: bytes, digests: Mapping[str, bytes]) -> str | None:
    """Return the name of a key's owner, or None, in constant time."""
    found, digest = None, sha256(given).digest()
    for name, known in digests.items():
        if hmac.compare_digest(digest, known):
            found = name
    return found
