"""The files of a folder of keys, which every Mac of a fabric has, and the name its members bear."""

from typing import Final

CLUSTER_KEY: Final = "cluster.key"  # 32 bytes in hex; salts, tickets and stored caches depend on it
AUTHORITY_CERTIFICATE: Final = "ca.pem"  # the authority that members trust, and clients may
MEMBER_CERTIFICATE: Final = "member.pem"
MEMBER_KEY: Final = "member.key"
RAY_TOKEN: Final = "ray.token"  # noqa: S105 - a file's name
SHIPPED_KEYS: Final = "~/macfabric/keys"  # where cluster.yaml has them put on every Mac
MADE_KEYS: Final = "~/.macfabric/cluster/keys"  # where they are made, before `ray up`
KEYS_DIGEST_BYTES: Final = 16

# In every member's certificate. A node is asked for by it and not by its address, which changes.
MEMBER_NAME: Final = "member.macfabric.internal"
