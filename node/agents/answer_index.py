"""Find which agents know an answer by its place, whichever conversation asks for it.

A conversation that was edited, or that a client goes on with under another name, is another agent
and has the same answers behind it.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from fabric.ids import AgentKey, TenantId
from fabric.record.answers import Answers, read_answers
from node.limits import ANSWERS_READ_MAX


class AnswerIndex:
    """Agents by the places of the answers that their records tell of."""

    def __init__(self) -> None:
        self._agents: dict[tuple[TenantId, int], set[AgentKey]] = defaultdict(set)
        self._spelled: dict[AgentKey, str] = {}
        self._places: dict[AgentKey, tuple[int, ...]] = {}
        # What was read last: a turn looks at its agent's three times.
        self._read: OrderedDict[AgentKey, tuple[str, Answers]] = OrderedDict()

    def put(self, key: AgentKey, spelled: str) -> None:
        """Index or re-index an agent by its record's answers."""
        if self._spelled.get(key, "") == spelled:
            return
        self.remove(key)
        self._spelled[key] = spelled
        self._places[key] = tuple(self.read(key, spelled))
        for place in self._places[key]:
            self._agents[key[0], place].add(key)

    def read(self, key: AgentKey, spelled: str) -> Answers:
        """Read what an agent's record has of its answers: once, while it is in use."""
        known, answers = self._read.pop(key, ("", {}))
        if known != spelled:
            answers = read_answers(spelled)
        if spelled and key in self._spelled:
            self._read[key] = spelled, answers
        while len(self._read) > ANSWERS_READ_MAX:
            self._read.popitem(last=False)
        return answers

    def remove(self, key: AgentKey) -> None:
        self._read.pop(key, None)
        self._spelled.pop(key, None)
        for place in self._places.pop(key, ()):
            known = self._agents[key[0], place]
            known.discard(key)
            if not known:
                del self._agents[key[0], place]

    def holders(self, tenant: TenantId, places: Iterable[int]) -> Iterable[AgentKey]:
        """Yield agents that know the answers at these places, of each place one."""
        for place in places:
            known = self._agents.get((tenant, place))
            if known:
                yield min(known)
