"""Conversations as their clients drive them: each turn follows from the answer before it."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from fabric.ids import AgentId
from router.simulate.content import ContentChain, Extent, Segment, segment

_ANSWER = 0x616E7377  # kind of a segment: the answer of one turn of one branch of a session


@dataclass(frozen=True, slots=True)
class Ask:
    """Turn of a script: what is added to the prompt, the answer's size, and the pause before it."""

    parts: tuple[tuple[Segment, int], ...]
    answer_tokens: int
    delay_s: float = 0.0  # after the answer before it
    is_fresh: bool = False  # `parts` are the whole prompt: the conversation starts again


Script: TypeAlias = Iterator[Ask]


@dataclass(slots=True, eq=False)
class ClientTurn:
    """Turn of one agent."""

    session: "Session"
    agent: AgentId
    prompt: Extent
    answer_tokens: int
    delay_s: float = 0.0  # after what it waits for
    branch: int = 0
    number: int = 0
    is_answered: bool = False

    def sketch(self) -> tuple[int, ...]:
        """Return the prompt's sketch, as the router would compute it."""
        pieces = self.prompt.pieces
        return tuple(pieces.tolist() if isinstance(pieces, array) else pieces)


class Session(Protocol):
    """Conversations that belong together."""

    def begin(self) -> Sequence[ClientTurn]:
        """Return the first turns; their delays count from the session's start."""
        ...

    def answer(self, turn: ClientTurn) -> None:
        """Extend the turn's conversation by its answer."""
        ...

    def after(self, turn: ClientTurn, now_s: float) -> Sequence[ClientTurn]:
        """Return the turns that waited for this one, which has ended now."""
        ...


class ScriptedSession:
    """Session of one or more agents, each with a script."""

    def __init__(self, name: str, seed: int, scripts: Iterable[Script]) -> None:
        self._seed = seed
        self._scripts = list(scripts)
        self._contents = [ContentChain() for _ in self._scripts]
        self._counts = [0] * len(self._scripts)
        several = len(self._scripts) > 1
        names = (f"{name}.{i}" if several else name for i in range(len(self._scripts)))
        self._agents = [AgentId(each) for each in names]

    def begin(self) -> Sequence[ClientTurn]:
        return [turn for branch in range(len(self._scripts)) for turn in self._next(branch)]

    def answer(self, turn: ClientTurn) -> None:
        name = segment(_ANSWER, self._seed, turn.branch, turn.number)
        turn.prompt.content.append(name, turn.answer_tokens)

    def after(self, turn: ClientTurn, now_s: float) -> Sequence[ClientTurn]:
        return self._next(turn.branch)

    def _next(self, branch: int) -> Sequence[ClientTurn]:
        ask = next(self._scripts[branch], None)
        if ask is None:
            return ()
        if ask.is_fresh:
            self._contents[branch] = ContentChain()
        content = self._contents[branch]
        content.extend(ask.parts)
        self._counts[branch] += 1
        turn = ClientTurn(
            self,
            self._agents[branch],
            Extent.of(content),
            ask.answer_tokens,
            ask.delay_s,
            branch,
            self._counts[branch],
        )
        return (turn,)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Session and the time at which it starts."""

    at_s: float
    session: Session
