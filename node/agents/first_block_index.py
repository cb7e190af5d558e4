"""Find the agents whose records begin with one block, those of the last turns first."""

from collections import defaultdict
from collections.abc import Iterator

from fabric.ids import AgentKey, BlockHash, TenantId
from fabric.record.manifest import Manifest

_Slot = tuple[TenantId, BlockHash]


class FirstBlockIndex:
    """Agents by the first block of what is stored of them."""

    def __init__(self) -> None:
        self._agents: dict[_Slot, dict[AgentKey, None]] = defaultdict(dict)
        self._slots: dict[AgentKey, _Slot] = {}

    def put(self, key: AgentKey, saved: Manifest | None) -> None:
        """Index or re-index an agent, as that of the last turn."""
        self.remove(key)
        if saved is not None and saved.pieces:
            slot = self._slots[key] = (key[0], saved.pieces[0].block.block_hash)
            self._agents[slot][key] = None

    def remove(self, key: AgentKey) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            del self._agents[slot][key]
            if not self._agents[slot]:
                del self._agents[slot]

    def newest(self, tenant: TenantId, block_hash: BlockHash) -> Iterator[AgentKey]:
        """Yield the agents of one block, the last one that was put first."""
        yield from reversed(self._agents.get((tenant, block_hash), {}))
