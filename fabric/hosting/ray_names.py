"""Names by which router and nodes find each other in a Ray cluster."""

from collections.abc import Mapping
from typing import Any, Final

from fabric.ids import NodeName, parse_node_name

NAMESPACE: Final = "macfabric"
RESOURCE: Final = "mlx"  # of a Ray node that runs a fabric node
LABEL: Final = "mac"  # of a Ray node: the name of its Mac
_ACTOR_PREFIX: Final = "macfabric-node-"


def actor_name(node: str) -> str:
    """Return the name of a node's actor."""
    return f"{_ACTOR_PREFIX}{node}"


def is_node_actor(actor: str) -> bool:
    """Return whether an actor's name has the prefix of a node's."""
    return actor.startswith(_ACTOR_PREFIX)


def node_of_actor(actor: str) -> NodeName:
    """Return the node of an actor's name; raise RejectedError if the rest is no node's name."""
    return parse_node_name(actor.removeprefix(_ACTOR_PREFIX))


def machine_of(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the address and label of a Ray node, which a restart keeps while its id changes."""
    return row["NodeManagerAddress"], row.get("Labels", {}).get(LABEL)
