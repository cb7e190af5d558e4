"""Find the stored conversation that a prompt without an agent id continues.

Each agent is indexed under the chained hash of its last prompt's 512-byte pieces, so the
agents whose last prompt may begin this one are found in one lookup per piece.
"""

from collections import defaultdict
from collections.abc import Iterable

from fabric.ids import AgentKey, TenantId
from fabric.turn.sketch import sketch_text

_Slot = tuple[TenantId, int]


class ConversationIndex:
    """Agents by the content of their last prompt."""

    def __init__(self) -> None:
        self._agents: dict[_Slot, set[AgentKey]] = defaultdict(set)
        self._slots: dict[AgentKey, _Slot] = {}

    def put(self, key: AgentKey, prompt: bytes) -> None:
        """Index or re-index an agent by its last prompt's text."""
        self.remove(key)
        sketch = sketch_text(prompt)
        slot = (key[0], sketch[-1] if sketch else 0)
        self._slots[key] = slot
        self._agents[slot].add(key)

    def remove(self, key: AgentKey) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._agents[slot].discard(key)
            if not self._agents[slot]:
                del self._agents[slot]

    def candidates(self, tenant: TenantId, prompt: bytes) -> Iterable[AgentKey]:
        """Yield agents whose last prompt may be a prefix of `prompt`, longest first."""
        for piece in (*reversed(sketch_text(prompt)), 0):
            yield from sorted(self._agents.get((tenant, piece), ()))
