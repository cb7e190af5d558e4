"""Versions of control calls that a node and a router support, and whether they are compatible.

    node reports      control 3, control_min 2      it serves routers of version 2 and later
    router            CONTROL_VERSION 2             it speaks 2, and serves nodes of
                      CONTROL_VERSION_MIN 1         version 1 and later: they serve together

`fabric/__init__.py` says when each is raised.
"""

from collections.abc import Mapping
from typing import Final

from fabric import CONTROL_VERSION, CONTROL_VERSION_MIN
from fabric.errors import FabricError
from fabric.ids import NodeName

OTHER_VERSION: Final = "other_version"  # error code for a node without a common version
BAD_NODE_ANSWER: Final = "bad_node_answer"  # error code for an answer that cannot be read
_FIRST: Final = 1  # version of nodes that report none


def check_versions(node: NodeName, reported: Mapping[str, object]) -> None:
    """Raise FabricError if a node reports no version in common with this router."""
    speaks, least = (reported.get(name) or _FIRST for name in ("control", "control_min"))
    if not isinstance(speaks, int) or not isinstance(least, int):
        return  # the view that has these is invalid
    if speaks < CONTROL_VERSION_MIN:
        what, remedy = f"version {speaks} of control calls", "upgrade the node"
    elif least > CONTROL_VERSION:
        what, remedy = f"no version of control calls before {least}", "upgrade the router"
    else:
        return
    supported = f"{CONTROL_VERSION_MIN} to {CONTROL_VERSION}"
    message = f"{node} speaks {what}, and this router speaks {supported}: {remedy}"
    raise FabricError(message, code=OTHER_VERSION)


def version_mismatch_message(error: FabricError) -> str | None:
    """Return the message for a node with answers of another version; None for other errors."""
    if error.code == BAD_NODE_ANSWER:
        return f"{error.message} (router and node may be of different versions: upgrade both)"
    return error.message if error.code == OTHER_VERSION else None
