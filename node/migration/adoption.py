"""What one move has brought to a node so far, and that no record there refers to yet."""

from dataclasses import dataclass, field

from fabric.ids import AgentKey
from fabric.kvcache.block import BlockRef


@dataclass(slots=True)
class Adoption:
    """Pinned blocks of one agent on its way in; touched on the node's event loop only."""

    key: AgentKey
    at_s: float  # when one last came
    refs: list[BlockRef] = field(default_factory=list)
