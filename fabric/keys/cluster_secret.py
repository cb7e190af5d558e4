"""The secret that a router shows to a node's HTTP server, derived from the cluster key."""

from hashlib import blake2b


def http_secret(cluster_key: bytes) -> str:
    """Derive the value of the cluster header, so that the key itself never travels."""
    return blake2b(digest_size=32, key=cluster_key, person=b"mf-http").hexdigest()
