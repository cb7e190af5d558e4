"""Turns of a simulated fabric: placed by the shipped router, sent, retried, and counted."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from fabric.errors import RetryLaterError
from fabric.ids import DEFAULT_TENANT, AgentId, AgentKey, NodeName, OperationId
from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from fabric.turn.generation import Identity, IdentityKind, Sampling
from router.placement.decision import Decision
from router.placement.load_ledger import Booking
from router.prompt import Prompt
from router.simulate.content import BYTES_PER_TOKEN
from router.simulate.engine import NodeTurn
from router.simulate.machine import MODEL, Machine
from router.simulate.moves import Network, SimulatedMoves
from router.simulate.router_side import RouterSide
from router.simulate.sessions import ClientTurn, Session
from router.simulate.timeline import Timeline
from router.turn_request import TurnRequest
from router.turns.targets import Target
from router.turns.turns import RETRY_S

HOP_S: Final = 0.001  # from router to node, and back
CLIENT_RETRY_S: Final = 1.0  # before a client repeats a request that broke off
_OPERATION: Final = OperationId("op_simulated")


class Observer(Protocol):
    """Observer of the turns that a baseline has placed, for its own account of load."""

    def note_start(self, ticket: int, node: NodeName) -> None:
        """Note that the turn decided last was sent to a node."""
        ...

    def note_first_token(self, ticket: int) -> None:
        """Note a turn's first token."""
        ...

    def note_end(self, ticket: int) -> None:
        """Note a turn's end."""
        ...


@dataclass(slots=True)
class Counters:
    """Counters of all turns of a run."""

    asked: int = 0
    answered: int = 0
    retried: int = 0
    relocated: int = 0  # turns on another node than their agent's previous turn
    prompt_tokens: int = 0
    turns_s: float = 0.0  # from requests to last tokens, of all turns
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))


@dataclass(slots=True, eq=False)
class TurnAttempt:
    """Turn until it is answered."""

    turn: ClientTurn
    request: TurnRequest
    asked_s: float
    ticket: int
    given_up: set[NodeName] = field(default_factory=set)
    has_moved: bool = False  # its agent was moved to serve it
    lost_since_s: float | None = None
    first_s: float | None = None


@dataclass(slots=True, eq=False)
class Sent:
    """Attempt on one node, with its booking."""

    attempt: TurnAttempt
    target: Target
    booking: Booking
    on_way: ExitStack = field(default_factory=ExitStack)  # undone when it has its memory
    is_admitted: bool = False
    has_memory: bool = False


class Dispatcher:
    """Clients and router of a simulated fabric."""

    def __init__(
        self,
        timeline: Timeline,
        router: RouterSide,
        machines: Mapping[NodeName, Machine],
        network: Network,
        observer: Observer | None = None,
        on_idle: Callable[[], None] = lambda: None,
        *,
        follows_prompts: bool = True,
    ) -> None:
        """Start without turns; `on_idle` is called whenever the last one has ended."""
        self._follows_prompts = follows_prompts
        self.counters = Counters()
        self.moves = SimulatedMoves(timeline, router.fleet, machines, network, self._is_running)
        self._timeline = timeline
        self._router = router
        self._fleet = router.fleet
        self._machines = machines
        self._observer = observer
        self._on_idle = on_idle
        self._takeover_after_s = RouterSettings().takeover_after_s
        self._left_count = 0  # turns that are planned or running
        self._running: set[AgentKey] = set()
        self._nodes: dict[AgentId, NodeName] = {}  # of each agent's last turn

    def begin(self, session: Session) -> None:
        """Ask a session's first turns."""
        self._plan(session.begin())

    def _plan(self, turns: Sequence[ClientTurn]) -> None:
        self._left_count += len(turns)
        for turn in turns:
            self._timeline.after(turn.delay_s, self.ask, turn)

    def ask(self, turn: ClientTurn) -> None:
        """Send a turn as its client does."""
        self.counters.asked += 1
        self.counters.prompt_tokens += turn.prompt.tokens
        request = _request_of(turn)
        attempt = TurnAttempt(turn, request, self._timeline.now_s, self.counters.asked)
        assert request.key is not None, "the turns of simulated clients name their agents"
        self._running.add(request.key)
        self._place(attempt)

    def _is_running(self, key: AgentKey) -> bool:
        return key in self._running

    # --- placement -----------------------------------------------------------------------------

    def _place(self, attempt: TurnAttempt) -> None:
        key = attempt.request.key
        assert key is not None, "named by `ask`"
        if self.moves.is_moving(key):
            self.moves.call_after_move(key, partial(self._place, attempt))
            return
        try:
            target = self._router.targets.choose(
                attempt.request, frozenset(attempt.given_up), may_move=not attempt.has_moved
            )
        except RetryLaterError as error:
            attempt.given_up.clear()
            self._timeline.after(error.retry_after_s, self._place, attempt)
            return
        if target.move is not None:
            self._move_first(attempt, target.move)
            return
        if target.reservation is not None:
            target.reservation.turns_count += 1
        booking = self._fleet.ledger.begin(target.node, target.prefill_s, cold=target.is_cold)
        if self._observer is not None:
            self._observer.note_start(attempt.ticket, target.node)
        sent = Sent(attempt, target, booking)
        if self._follows_prompts:
            self._note_on_way(sent)
        self._timeline.after(HOP_S, self._deliver, sent)

    def _note_on_way(self, sent: Sent) -> None:
        """Let other turns find a prompt's beginning where it is about to be computed, or lent."""
        sketches, ledger, target = self._fleet.sketches, self._fleet.ledger, sent.target
        sketch, borrows = sent.attempt.request.prompt.sketch, target.head is not None
        name = sketches.put_coming(DEFAULT_TENANT, target.node, sketch, borrows=borrows)
        sent.on_way.callback(sketches.remove, DEFAULT_TENANT, target.node, name)
        if target.head is not None and target.decision is not None:
            lent_bytes = target.decision.carried_bytes
            sent.on_way.enter_context(ledger.lending(target.head.source, lent_bytes))

    def _note_memory(self, sent: Sent) -> None:
        """Note that a turn has its memory: only now do real nodes admit those that wait for it."""
        sent.on_way.close()
        sent.has_memory = True
        attempt, node = sent.attempt, sent.target.node
        prompt, left_s = attempt.request.prompt, sent.booking.prefill_s
        self._fleet.sketches.put(
            DEFAULT_TENANT,
            node,
            attempt.turn.agent,
            prompt.sketch,
            opening=prompt.opening,
            is_coming=self._follows_prompts and left_s > 0,
        )

    def _move_first(self, attempt: TurnAttempt, move: Decision) -> None:
        """Move the idle agent of a turn, then place the turn again."""
        assert move.ship is not None, "a move has a transfer"
        assert move.agent is not None, "a move names its agent"
        key, ledger = (DEFAULT_TENANT, move.agent), self._fleet.ledger
        attempt.has_moved = True
        self._fleet.activity.note_move(key)
        booking = ledger.begin(move.node, move.terms.prefill_s, cold=False)

        def place() -> None:
            ledger.end(booking)
            self._place(attempt)

        self.moves.move(key, move.ship, place)

    def _deliver(self, sent: Sent) -> None:
        """Hand a turn to its node, which admits it at once."""
        machine, attempt = self._machines[sent.target.node], sent.attempt
        if not machine.is_up:
            self._close(sent)
            self._wait_or_give_up(attempt, sent.target)
            return
        turn, key = attempt.turn, attempt.request.key
        assert key is not None, "named by `ask`"
        job = NodeTurn(
            agent=turn.agent,
            prompt=turn.prompt,
            answer_tokens=turn.answer_tokens,
            epoch=sent.target.epoch,
            sketch=attempt.request.prompt.sketch,
            on_first=partial(self._on_first, sent),
            on_end=partial(self._on_end, sent),
            on_lost=partial(self._on_lost, sent),
            on_progress=partial(self._on_progress, sent),
            lender=sent.target.head.source if sent.target.head is not None else None,
        )
        epoch = machine.start(job)
        if sent.target.reservation is not None:
            sent.target.reservation.epoch = epoch
        self._fleet.note_holding(key, machine.name, epoch, OwnerState.OWNED)
        self._fleet.activity.begin_turn(key)
        sent.is_admitted = True
        before = self._nodes.get(turn.agent)
        self.counters.relocated += before is not None and before != machine.name
        self._nodes[turn.agent] = machine.name

    def _wait_or_give_up(self, attempt: TurnAttempt, target: Target) -> None:
        """Wait for a node that does not answer, as the router does before it chooses another."""
        now_s = self._timeline.now_s
        if attempt.lost_since_s is None:
            attempt.lost_since_s = now_s
        patience_s = self._takeover_after_s if target.waits else 0.0
        is_down = not self._fleet.is_up(target.node)
        if is_down or now_s - attempt.lost_since_s >= patience_s:
            attempt.given_up.add(target.node)
            attempt.lost_since_s = None
            self._place(attempt)
        else:
            self._timeline.after(RETRY_S, self._place, attempt)

    # --- what nodes answer ---------------------------------------------------------------------

    def _on_progress(self, sent: Sent, done_tokens: int) -> None:
        """Note a node's report on a prompt, as the router does."""
        if not self._follows_prompts:
            return
        self._fleet.note_progress(sent.booking, sent.attempt.turn.prompt.tokens, done_tokens)
        if not sent.has_memory:
            self._note_memory(sent)

    def _on_first(self, sent: Sent) -> None:
        if not sent.has_memory:
            self._note_memory(sent)
        self._fleet.ledger.end_prefill(sent.booking)
        self._fleet.sketches.settle(DEFAULT_TENANT, sent.target.node, sent.attempt.turn.agent)
        sent.attempt.first_s = self._timeline.now_s + HOP_S
        if self._observer is not None:
            self._observer.note_first_token(sent.attempt.ticket)

    def _on_end(self, sent: Sent) -> None:
        attempt = sent.attempt
        turn, first_s = attempt.turn, attempt.first_s
        assert first_s is not None, "an answer has a first token"
        assert not turn.is_answered, "a turn is answered once"
        if self._follows_prompts:
            self._fleet.note_answer(sent.booking, turn.answer_tokens)
        self._close(sent)
        turn.is_answered = True
        self.counters.answered += 1
        self.counters.ttft_s.append(first_s - attempt.asked_s)
        self.counters.turns_s += self._timeline.now_s + HOP_S - attempt.asked_s
        if attempt.request.key is not None:
            self._running.discard(attempt.request.key)
        turn.session.answer(turn)
        self._timeline.after(HOP_S, self._follow, turn)

    def _follow(self, turn: ClientTurn) -> None:
        self._plan(turn.session.after(turn, self._timeline.now_s))
        self._left_count -= 1
        if not self._left_count:
            self._on_idle()

    def _on_lost(self, sent: Sent) -> None:
        """Repeat a turn whose node was lost, as its client does."""
        self._close(sent)
        sent.attempt.first_s = None
        self.counters.retried += 1
        self._timeline.after(CLIENT_RETRY_S, self._place, sent.attempt)

    def _close(self, sent: Sent) -> None:
        key, reservation = sent.attempt.request.key, sent.target.reservation
        sent.on_way.close()
        if sent.booking.open and reservation is not None and key is not None:
            self._fleet.directory.release(key, reservation)
        self._fleet.ledger.end(sent.booking)
        self._fleet.sketches.settle(DEFAULT_TENANT, sent.target.node, sent.attempt.turn.agent)
        if sent.is_admitted and key is not None:
            self._fleet.activity.end_turn(key)
            sent.is_admitted = False
        if self._observer is not None:
            self._observer.note_end(sent.attempt.ticket)


def _request_of(turn: ClientTurn) -> TurnRequest:
    sketch = turn.sketch()
    ends = turn.prompt.content.ends[: turn.prompt.count]
    return TurnRequest(
        operation=_OPERATION,
        tenant=DEFAULT_TENANT,
        model=MODEL,
        identity=Identity(IdentityKind.AGENT, turn.agent),
        sampling=Sampling(max_tokens=turn.answer_tokens),
        prompt=Prompt(
            sketch=sketch,
            opening=sketch[0],
            bytes_count=turn.prompt.tokens * BYTES_PER_TOKEN,
            sketch_ends=tuple(end * BYTES_PER_TOKEN for end in ends),
        ),
    )
