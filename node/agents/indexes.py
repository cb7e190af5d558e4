"""Indexes of one node's agents: by answer, conversation, first block and last use; sketch sizes."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from math import inf
from typing import Final, Generic, TypeVar

from fabric.ids import AgentKey, BlockHash, TenantId
from fabric.limits import RETAIN_S_MAX
from fabric.ports import Clock
from fabric.record.answers import Answers, decode_answers
from fabric.record.manifest import Manifest
from fabric.retention import ReuseProbability
from fabric.turn.conversation_form import ConversationForm
from fabric.turn.sketch import is_whole_sketch, sketch_text
from node.limits import ANSWERS_READ_MAX, SKETCH_LENGTHS_MAX

PROMISED_REUSE: Final = 0.95  # probability that a client returns after announcing it
_ContentSlot = tuple[TenantId, str, int]
_BlockSlot = tuple[TenantId, BlockHash]
_MESSAGES, _TEXT = "messages", "text"

Slot = TypeVar("Slot")


class AnswerIndex:
    """Agents by the places of the answers that their records remember.

    An edited conversation, or one that a client continues under another name, is another agent with
    the same earlier answers.
    """

    def __init__(self) -> None:
        self._agents: dict[tuple[TenantId, int], set[AgentKey]] = defaultdict(set)
        self._spelled: dict[AgentKey, str] = {}
        self._places: dict[AgentKey, tuple[int, ...]] = {}
        # Recently parsed answers: a turn reads its agent's answers three times.
        self._read: OrderedDict[AgentKey, tuple[str, Answers]] = OrderedDict()

    def put(self, key: AgentKey, spelled: str) -> None:
        """Index an agent by its record's answers, again if they changed."""
        if self._spelled.get(key, "") == spelled:
            return
        self.remove(key)
        self._spelled[key] = spelled
        self._places[key] = tuple(self.read(key, spelled))
        for place in self._places[key]:
            self._agents[key[0], place].add(key)

    def read(self, key: AgentKey, spelled: str) -> Answers:
        """Return an agent's remembered answers, parsed once while it is in use."""
        parsed, answers = self._read.pop(key, ("", {}))
        if parsed != spelled:
            answers = decode_answers(spelled)
        if spelled and key in self._spelled:
            self._read[key] = spelled, answers
        while len(self._read) > ANSWERS_READ_MAX:
            self._read.popitem(last=False)
        return answers

    def remove(self, key: AgentKey) -> None:
        self._read.pop(key, None)
        self._spelled.pop(key, None)
        for place in self._places.pop(key, ()):
            agents = self._agents[key[0], place]
            agents.discard(key)
            if not agents:
                del self._agents[key[0], place]

    def holders(self, tenant: TenantId, places: Iterable[int]) -> Iterable[AgentKey]:
        """Yield one agent for each place whose answer any agent remembers."""
        for place in places:
            agents = self._agents.get((tenant, place))
            if agents:
                yield min(agents)


class ConversationIndex:
    """Agents by the content of their last prompt, for prompts without an agent id.

    Each agent is indexed by the chained hash of its last request's messages as the client sent
    them, and by that of the 512-byte pieces of the rendered text, which lacks what the template
    leaves out. So finding the agents whose last prompt may begin this one takes one lookup a piece.
    """

    def __init__(self) -> None:
        self._agents: dict[_ContentSlot, set[AgentKey]] = defaultdict(set)
        self._slots: dict[AgentKey, list[_ContentSlot]] = {}

    def put(self, key: AgentKey, text: bytes, sketch: Sequence[int] = ()) -> None:
        """Index an agent by its last prompt's text and messages, replacing earlier ones."""
        self.remove(key)
        pieces = sketch_text(text)
        slots: list[_ContentSlot] = [(key[0], _TEXT, pieces[-1] if pieces else 0)]
        if is_whole_sketch(sketch):
            slots.append((key[0], _MESSAGES, sketch[-1]))
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

    def by_messages(self, tenant: TenantId, sketch: Sequence[int]) -> Iterable[AgentKey]:
        """Yield agents whose last messages begin the sketched ones, the longest first."""
        for piece in reversed(sketch) if is_whole_sketch(sketch) else ():
            yield from sorted(self._agents.get((tenant, _MESSAGES, piece), ()))


class _SlotIndex(Generic[Slot]):
    """Agents by a slot that several may share, the one used last at the end."""

    def __init__(self) -> None:
        self._agents: dict[Slot, dict[AgentKey, None]] = defaultdict(dict)
        self._slots: dict[AgentKey, Slot] = {}

    def remove(self, key: AgentKey) -> None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            del self._agents[slot][key]
            if not self._agents[slot]:
                del self._agents[slot]

    def _put(self, key: AgentKey, slot: Slot | None) -> None:
        self.remove(key)
        if slot is not None:
            self._slots[key] = slot
            self._agents[slot][key] = None

    def _newest(self, slot: Slot) -> Iterator[AgentKey]:
        return reversed(self._agents.get(slot, {}))


class FormIndex(_SlotIndex[tuple[TenantId, int]]):
    """Agents by the form of their conversation, for prompts whose earlier texts were rewritten."""

    def put(self, key: AgentKey, form: ConversationForm | None) -> None:
        """Index an agent again, as the one used last."""
        self._put(key, (key[0], form.digest) if form is not None else None)

    def candidates(self, tenant: TenantId, digests: Iterable[int]) -> Iterator[AgentKey]:
        """Yield the agents with these forms in their order, of each the one used last first."""
        for digest in digests:
            yield from self._newest((tenant, digest))


class FirstBlockIndex(_SlotIndex[_BlockSlot]):
    """Agents by the first block of their stored records."""

    def put(self, key: AgentKey, saved: Manifest | None) -> None:
        """Index an agent again, as the one used last."""
        first = saved.pieces[0].block.block_hash if saved is not None and saved.pieces else None
        self._put(key, (key[0], first) if first is not None else None)

    def newest(self, tenant: TenantId, block_hash: BlockHash) -> Iterator[AgentKey]:
        """Yield the agents whose records begin with a block, the one used last first."""
        yield from self._newest((tenant, block_hash))


class UseLog:
    """Idle times of a node's agents, and the probability that each is used again.

    Idle time grows by the steady clock, over restarts by `node.store.service_time`. An agent that
    comes from another node begins anew. A client may announce until when it returns; until then its
    agent counts as just used. A restart or a move forgets the announcement.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reuse = ReuseProbability()
        self._seen: dict[AgentKey, tuple[float, float]] = {}  # used_s, and steady seconds
        self._retained_s: dict[AgentKey, float] = {}  # end of the announced time, in steady seconds

    def recover(self, record: Manifest, idle_s: float) -> None:
        """Add a record that was stored when this process began."""
        since_s = self._clock.monotonic_s() - idle_s
        self._seen[record.key] = (record.used_s, since_s)
        self._reuse.note_all(record.tenant, record.revision)

    def note(self, record: Manifest) -> None:
        """Note a record, which is a turn if its time of use has changed."""
        key, now_s = record.key, self._clock.monotonic_s()
        last_use = self._seen.get(key)
        if last_use is None:
            self.recover(record, 0.0)
        elif last_use[0] != record.used_s:
            self._seen[key] = (record.used_s, now_s)
            self._reuse.note(record.tenant, record.revision)

    def forget(self, record: Manifest) -> None:
        """Drop an agent, but keep its tenant's reuse statistics."""
        self._seen.pop(record.key, None)
        self._retained_s.pop(record.key, None)

    def retain(self, key: AgentKey, retain_s: float) -> None:
        """Note at a turn's end within which time its client announced to return; 0: not at all."""
        self._retained_s.pop(key, None)
        if retain_s > 0:
            self._retained_s[key] = self._clock.monotonic_s() + min(retain_s, RETAIN_S_MAX)

    def idle_s(self, record: Manifest) -> float:
        """Return the seconds since the agent's last turn, or since it need not be retained."""
        last_use = self._seen.get(record.key)
        if last_use is None:
            return 0.0
        since_s = max(last_use[1], self._retained_s.get(record.key, -inf))
        return max(0.0, self._clock.monotonic_s() - since_s)

    def reuse_probability(self, record: Manifest) -> float:
        learned = self._reuse.probability(record.tenant, record.revision)
        is_promised = self._clock.monotonic_s() < self._retained_s.get(record.key, 0.0)
        return max(learned, PROMISED_REUSE) if is_promised else learned


class SketchHistory:
    """Last lengths of a sketch that only grew, so that a list sends only what was added.

    change   3   9  14         each: from this change on, the sketch had so many pieces,
    pieces   2   5   8         and each is a beginning of the next
    """

    def __init__(self) -> None:
        self._sketch: Sequence[int] = ()
        self._last = 0
        self._lengths: tuple[tuple[int, int], ...] = ()

    def note(self, sketch: Sequence[int], change: int) -> None:
        """Record an agent's sketch at a change of the agent."""
        if sketch is self._sketch and self._lengths:
            return
        before, self._sketch = len(self._sketch), sketch
        # Hashes are chained: one piece tells whether all before it are the same.
        grew = 0 < before <= len(sketch) and sketch[before - 1] == self._last
        lengths = self._lengths[1 - SKETCH_LENGTHS_MAX :] if grew else ()
        self._last = sketch[-1] if sketch else 0
        self._lengths = (*lengths, (change, len(sketch)))

    def kept_pieces(self, sketch: Sequence[int], change: int) -> int:
        """Return the number of pieces that a sketch has had since `change`; 0 if unknown.

        A sketch that is not noted yet, as its change is still being stored, is unknown.
        """
        if sketch is not self._sketch:
            return 0
        lengths = takewhile(lambda length: length[0] <= change, self._lengths)
        return max((pieces for _, pieces in lengths), default=0)
