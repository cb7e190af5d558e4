"""Secrets that must not travel between machines, in every encoding."""

from fabric.keys import http_secret

WINDOW_BYTES = 256
TOKENS_BYTES = 4 * 256 + WINDOW_BYTES  # at a block's end, in a window that begins before them


def keys_of(cluster_key: str, member_key: str, password: bytes) -> dict[str, bytes]:
    """Return a fabric's keys by name, from its key files."""
    key = bytes.fromhex(cluster_key)
    return {
        "the cluster's key": key,
        "the cluster's key in hex": key.hex().encode(),
        "the secret of nodes": http_secret(key).encode(),
        "a member's key": member_key.splitlines()[1].encode(),
        "Ray's password": password,
    }


def parts_of(block: bytes) -> dict[str, bytes]:
    """Return parts of a block's file by name: of its tokens, and the least uniform of the rest."""
    end = len(block) - TOKENS_BYTES  # tokens are searched separately
    windows = (block[at : at + WINDOW_BYTES] for at in range(16_384, end, WINDOW_BYTES))
    return {
        "the prompt's tokens": block[-64:],
        "a block": max(windows, key=lambda window: len(set(window))),
    }
