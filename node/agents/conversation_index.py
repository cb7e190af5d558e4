"""Find the stored conversation that a prompt without an agent id continues.

Each agent is indexed twice by its last request: under the chained hash of its messages as the
client sent them, whatever the template makes of them, and under that of the 512-byte pieces of
the text that came of them, whatever the client has changed that the template leaves out. So the
agents whose last prompt may begin this one are found in one lookup per piece.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from fabric.ids import AgentKey, TenantId
from fabric.turn.sketch import is_whole_sketch, sketch_text

_Slot = tuple[TenantId, str, int]
_SAID, _TEXT = "said", "text"


class ConversationIndex:
    """Agents by the content of their last prompt."""

    def __init__(self) -> None:
        self._agents: dict[_Slot, set[AgentKey]] = defaultdict(set)
        self._slots: dict[AgentKey, list[_Slot]] = {}

    def put(self, key: AgentKey, text: bytes, sketch: Sequence[int] = ()) -> None:
        """Index or re-index an agent by its last prompt's text and messages."""
        self.remove(key)
        pieces = sketch_text(text)
        slots: list[_Slot] = [(key[0], _TEXT, pieces[-1] if pieces else 0)]
        if is_whole_sketch(sketch):
            slots.append((key[0], _SAID, sketch[-1]))
        self._slots[key] = slots
        for slot in slots:
            self._agents[slot].add(key)

    def remove(self, key: AgentKey) -> None:
        for slot in self._slots.pop(key, ()):
            self._agents[slot].discard(key)
            if not self._agents[slot]:
                del self._agents[slot]

    def candidates(self, tenant: TenantId, prompt: bytes) -> Iterable[AgentKey]:
        """Yield agents whose last prompt may be a prefix of `prompt`, longest first."""
        for piece in (*reversed(sketch_text(prompt)), 0):
            yield from sorted(self._agents.get((tenant, _TEXT, piece), ()))

    def said(self, tenant: TenantId, sketch: Sequence[int]) -> Iterable[AgentKey]:
        """Yield agents whose last request's messages begin these ones, most of them first."""
        for piece in reversed(sketch) if is_whole_sketch(sketch) else ():
            yield from sorted(self._agents.get((tenant, _SAID, piece), ()))
