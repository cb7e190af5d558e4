"""Cache of a modelled node: agents in memory and on disk, and the blocks others may use.

running     caches of turns, reserved before they run
hot         idle caches in memory; the one used longest ago goes first, its disk copy stays
disk        every agent that had a turn; the one used longest ago goes first
published   whole blocks that other agents find: of an answering turn's prompt one after
            another, as its saver writes them, and of ended turns all
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fabric.ids import AgentId
from fabric.limits import BLOCK_TOKENS
from fabric.record.manifest import OwnerState
from router.simulate.content import Extent
from router.simulate.prefix_tree import PrefixTree

SAVER_FIRST_S: Final = 0.25  # before a node saves the first block of a turn that answers
BORROWED_S: Final = 60.0  # for which blocks of other nodes are found; turns store them meanwhile
SAVER_SHARE: Final = 1 / 20  # of the time that it then spends on saving


@dataclass(slots=True)
class KeptAgent:
    """Agent on a node's disk, and perhaps in its memory."""

    agent: AgentId
    extent: Extent
    sketch: tuple[int, ...]
    epoch: int
    revision: int
    state: OwnerState = OwnerState.OWNED
    own_tokens: int = 0  # that no agent stored before it has
    used_s: float = 0.0


@dataclass(slots=True)
class Publication:
    """Prompt of a turn that answers; its blocks become visible one by one."""

    extent: Extent
    since_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """Part of a prompt that a node has cached, and what it must read from its disk for that."""

    tokens: int = 0
    disk_tokens: int = 0


class NodeCache:
    """Caches of one node, with its budgets of memory and disk."""

    def __init__(
        self, hot_bytes: int, disk_bytes: int, bytes_per_token: int, disk_bytes_per_s: float
    ) -> None:
        self.bytes_per_token = bytes_per_token
        self.agents: OrderedDict[AgentId, KeptAgent] = OrderedDict()  # the last used at the end
        self.cooled: list[AgentId] = []  # left memory since the machine's last list
        self.evicted: list[AgentId] = []  # left the disk since the machine's last list
        self.disk_tokens = 0
        self._hot: OrderedDict[AgentId, int] = OrderedDict()  # tokens of idle caches in memory
        self._hot_tokens = 0
        self._running_tokens = 0
        self._hot_tokens_max = max(1, hot_bytes // bytes_per_token)
        self._disk_tokens_max = max(1, disk_bytes // bytes_per_token)
        self._tree = PrefixTree()
        self._publications: dict[AgentId, Publication] = {}
        self._borrowed: deque[tuple[float, Extent]] = deque()  # and until when
        self._block_s = BLOCK_TOKENS * bytes_per_token / disk_bytes_per_s / SAVER_SHARE

    @property
    def hot_bytes(self) -> int:
        return (self._hot_tokens + self._running_tokens) * self.bytes_per_token

    @property
    def free_hot_bytes(self) -> int:
        return max(0, self._hot_tokens_max * self.bytes_per_token - self.hot_bytes)

    @property
    def free_disk_bytes(self) -> int:
        return max(0, self._disk_tokens_max - self.disk_tokens) * self.bytes_per_token

    def is_hot(self, agent: AgentId) -> bool:
        """Return whether an idle agent is in memory."""
        return agent in self._hot

    def look_up(self, agent: AgentId, prompt: Extent, now_s: float) -> Found:
        """Return the longest part of a prompt that is cached here and visible to the agent.

        The agent's own cache is reused to the token, others' by whole blocks. The last token of a
        prompt is always computed.
        """
        stored = self.agents.get(agent)
        own_tokens = (
            prompt.tokens_of(stored.extent.common_count(prompt)) if stored is not None else 0
        )
        own_tokens = min(own_tokens, prompt.tokens - 1)
        shared_tokens = self.shared_tokens(prompt, now_s)
        shared_tokens = min(shared_tokens, prompt.tokens - 1)
        shared_tokens -= shared_tokens % BLOCK_TOKENS
        if own_tokens >= shared_tokens:
            return Found(own_tokens, 0 if agent in self._hot else own_tokens)
        return Found(shared_tokens, shared_tokens)

    def shared_tokens(self, prompt: Extent, now_s: float) -> int:
        """Return the tokens of a prompt that any agent's blocks have here."""
        shared = prompt.tokens_of(self._tree.longest(prompt.pieces))
        for publication in self._publications.values():
            common = prompt.tokens_of(publication.extent.common_count(prompt))
            if common > shared:
                shared = max(shared, min(common, self._saved_tokens(publication, now_s)))
        while self._borrowed and self._borrowed[0][0] <= now_s:
            self._borrowed.popleft()
        for _, extent in self._borrowed:
            shared = max(shared, prompt.tokens_of(extent.common_count(prompt)))
        return shared

    def borrow(self, extent: Extent, now_s: float) -> None:
        """Store blocks that another node has sent, for as long as an unused lease lasts."""
        self._borrowed.append((now_s + BORROWED_S, extent))

    def _saved_tokens(self, publication: Publication, now_s: float) -> int:
        """Return the tokens of a running turn's prompt whose blocks are saved."""
        elapsed_s = now_s - publication.since_s - SAVER_FIRST_S
        if elapsed_s < 0:
            return 0
        return BLOCK_TOKENS * (1 + int(elapsed_s / self._block_s))

    def reserve(self, agent: AgentId, tokens: int, *, is_alone: bool) -> bool:
        """Take memory for a turn, of which the agent's own cache is a part.

        Idle caches make room. A turn that needs more than there is runs alone.
        """
        room = self._hot_tokens_max - self._running_tokens
        if tokens > room and not is_alone:
            return False
        self._hot_tokens -= self._hot.pop(agent, 0)
        self._running_tokens += tokens
        self._make_room()
        return True

    def release(self, tokens: int) -> None:
        """Return the memory of a turn."""
        self._running_tokens -= tokens

    def answer(self, agent: AgentId, prompt: Extent, now_s: float) -> None:
        """Begin to publish the blocks of a turn's prompt."""
        self._publications[agent] = Publication(prompt, now_s)

    def keep(self, record: KeptAgent, *, is_hot: bool) -> None:
        """Store an agent after its turn or its move, and publish all its blocks."""
        self.drop(record.agent)
        shared_count = self._tree.add(record.extent.pieces)
        record.own_tokens = record.extent.tokens - record.extent.tokens_of(shared_count)
        self.disk_tokens += record.own_tokens
        self.agents[record.agent] = record
        if is_hot:
            self._hot[record.agent] = record.extent.tokens
            self._hot_tokens += record.extent.tokens
            self._make_room()
        while self.disk_tokens > self._disk_tokens_max and len(self.agents) > 1:
            oldest = next(iter(self.agents))
            self.drop(oldest)
            self.evicted.append(oldest)

    def end_answer(self, agent: AgentId) -> None:
        """End the publication of a turn's blocks; `keep` publishes all of them."""
        self._publications.pop(agent, None)

    def drop(self, agent: AgentId) -> None:
        """Remove an agent and withdraw its blocks, if it is here."""
        record = self.agents.pop(agent, None)
        if record is None:
            return
        self._tree.remove(record.extent.pieces)
        self.disk_tokens -= record.own_tokens
        self._hot_tokens -= self._hot.pop(agent, 0)

    def lose_memory(self) -> None:
        """Lose what is in memory only, as a node that dies does."""
        self._hot.clear()
        self._publications.clear()
        self._hot_tokens = self._running_tokens = 0

    def _make_room(self) -> None:
        while self._hot and self._hot_tokens + self._running_tokens > self._hot_tokens_max:
            agent, tokens = self._hot.popitem(last=False)
            self._hot_tokens -= tokens
            self.cooled.append(agent)

    def missing_tokens(self, pieces: Sequence[int], extent: Extent) -> int:
        """Return the tokens of a chain whose blocks are not stored here."""
        return extent.tokens - extent.tokens_of(self._tree.longest(pieces))
