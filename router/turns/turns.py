"""Turns: admission by a node, retries until then, and continuation on another node after a move.

Once a node has sent its first event, nothing is retried: the client sees where the answer broke.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial

from fabric.edit_mode import EditMode
from fabric.errors import (
    FabricError,
    OverloadedError,
    RetryElsewhereError,
    RetryLaterError,
)
from fabric.hosting.tracing import Span, failure_of, span
from fabric.hosting.turn_context import about_trace, current_trace
from fabric.ids import AgentKey
from fabric.limits import BLOCK_TOKENS
from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from fabric.turn.generation import (
    Admitted,
    Event,
    GenerateRequest,
    HandedOver,
    Identity,
    IdentityKind,
)
from router.events import FleetEvent, TurnBegan, TurnEnded
from router.fleet.directory import Directory, StartReservation
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLostError
from router.fresh_ids import fresh_turn
from router.limits import (
    MOVE_START_S,
    MOVE_TIMEOUT_FACTOR,
    OWNER_WAIT_S_MAX,
)
from router.moves.move_registry import MoveRegistry
from router.moves.prefetches import PrefetchRequests
from router.moves.recovery import Recovery
from router.placement.agent_moves import ANSWER_TOKENS
from router.placement.decision import Decision
from router.placement.placement import Placement
from router.telemetry import Telemetry
from router.turn_request import TurnRequest
from router.turns.attempts import (
    AdmittedTurn,
    Attempt,
    StaleTargetError,
    admission_of,
    announce_prompt,
    give_up_unless,
)
from router.turns.decision_log import DecidedTurn, DecisionLog
from router.turns.expected_turns import ExpectedTurns
from router.turns.open_turn import (
    Breaker,
    EndedTurn,
    OpenTurn,
    RunningTurns,
    begin_turn_span,
    note_admission_in,
)
from router.turns.owner_wait import AwaitedNodes, OwnerWait
from router.turns.targets import Target, Targets
from router.turns.tenant_limits import TenantAccounts
from router.turns.turn_queues import Place, QueueRules, TurnQueues

_LOG = logging.getLogger("macfabric.router.turns")

RETRY_S = 0.1
RESUMING_POLL_S = 0.02


class Turns:
    """Turns that are opened on nodes, and retried until a node has sent its first event."""

    def __init__(
        self,
        fleet: Fleet,
        moves: MoveRegistry,
        recovery: Recovery,
        telemetry: Telemetry,
        settings: RouterSettings,
        placement: Placement,
        prefetches: PrefetchRequests,
    ) -> None:
        self._fleet = fleet
        self._moves = moves
        self._recovery = recovery
        self._telemetry = telemetry
        self._takeover_after_s = settings.takeover_after_s
        self._resuming: Counter[AgentKey] = Counter()  # turns that continue after a move
        self._hint = prefetches.hint
        self.running = RunningTurns()
        self.decisions = DecisionLog(fleet.clock, telemetry)
        rules = QueueRules(settings.queue_max, settings.tenant_weights)
        self.queues = TurnQueues(rules, fleet.clock, telemetry)
        self._expected = ExpectedTurns(fleet.directory, prefetches, self.queues, telemetry)
        self.accounts = TenantAccounts(settings.tenant_limits, fleet.clock, telemetry)
        self._targets = Targets(
            fleet, placement, telemetry, moves_agents=settings.moves_idle_agents
        )
        self._owner_wait = OwnerWait(fleet)

    async def open(self, turn: TurnRequest, waiting: AwaitedNodes | None = None) -> OpenTurn:
        """Return the turn once a node has admitted it; `waiting` shows what it waits for."""
        with self.accounts.count_turn(turn.tenant):
            breaker = self.running.begin()
            try:
                await breaker.wait(self._fleet.discovery.require_model(turn.model))
                opened = await breaker.wait(self._open(turn, breaker, waiting or AwaitedNodes()))
            except BaseException:
                self.running.discard(breaker)
                raise
        self._hint(turn.tenant, turn.prefetch)
        return opened

    async def _open(self, turn: TurnRequest, breaker: Breaker, waiting: AwaitedNodes) -> OpenTurn:
        started_s = self._now_s()
        turn = turn if turn.id is not None else replace(turn, id=fresh_turn())
        placed, turn_span = await self._admit_counted(turn, waiting)
        first = placed.first
        key = turn.tenant, first.agent
        # Headers report which memory serves the turn: a continuation must use the same one.
        edits = turn.edits if first.amortized_tokens else EditMode.FORGET
        publish = self._fleet.events.publish if turn.is_kept else _discard
        publish(TurnBegan.of(turn.tenant, placed.first, turn.id))
        self._fleet.sessions.note(turn.tenant, placed.first.node, turn.session, turn.sub_agent)
        self._expected.note(turn, key[1])
        self._rebook(placed, 0)
        self._fleet.activity.begin_turn(key)
        decided = self._log(turn, placed, started_s)

        def note_prefill(tokens: int) -> None:
            self._rebook(placed, tokens)
            if tokens >= placed.first.prompt_tokens:
                self._fleet.sketches.settle(turn.tenant, placed.first.node, key[1])
                if decided is not None:
                    self.decisions.note_first_token(decided)

        def end(ended: EndedTurn) -> None:
            self.running.discard(breaker)
            self._fleet.sketches.settle(turn.tenant, placed.first.node, key[1])
            if decided is not None:
                self.decisions.end(decided, ended)
            self._fleet.activity.end_turn(key)
            if ended.outcome == "ok":
                self._fleet.note_answer(placed.entry, ended.completion_tokens)
            placed.end()  # on the node where it runs by then
            ended.end_span(turn_span)
            self._note_end(turn, first, ended)
            ran = placed.first.node, ended.outcome, ended.completion_tokens, ended.seconds
            publish(TurnEnded(key, *ran, turn.id, ended.times))
            _LOG.info("agent %s on %s: %s", self._fleet.alias(key), placed.first.node, ended)

        async def follow(handed: HandedOver) -> AsyncGenerator[Event, None]:
            nonlocal placed
            placed.end()
            identity = Identity(IdentityKind.AGENT, key[1])
            further = replace(turn, identity=identity, resume=handed.resume, edits=edits)
            further = replace(further, was_admitted=True)
            _LOG.info("agent %s: its turn continues on its new node", self._fleet.alias(key))
            self._resuming[key] += 1
            try:
                with about_trace(turn_span.trace):
                    ahead = await self._send_ahead(further, key)
                    placed = ahead or await self._admit(further, waiting, goes_first=True)
            finally:
                self._resuming[key] -= 1
                self._resuming += Counter()  # drops zeros
            return placed.source

        return OpenTurn(
            placed.first,
            placed.source,
            started_s=started_s,
            clock=self._fleet.clock,
            telemetry=self._telemetry,
            on_prefilled=note_prefill,
            on_decoding=lambda: self._expected.prepare(turn, key[1]),
            on_end=end,
            follow=follow,
            alias=self._fleet.alias(key),
            is_current=lambda: self._is_current(turn, placed),
            on_unsaved=lambda: self._fleet.membership.request_state(placed.first.node),
            breaker=breaker,
        )

    def _note_end(self, turn: TurnRequest, first: Admitted, ended: EndedTurn) -> None:
        recompute_s = self._fleet.recompute_s(first.node, first.cached_tokens)
        self.accounts.note_end(turn.tenant, ended, first.cache, recompute_s)

    def _log(self, turn: TurnRequest, placed: AdmittedTurn, started_s: float) -> DecidedTurn | None:
        if placed.decision is None:
            return None
        alias = self._fleet.alias((turn.tenant, placed.first.agent))
        decision, first = placed.decision, placed.first
        return self.decisions.add(alias, decision, first, turn.prompt, started_s, turn.id)

    def _rebook(self, placed: AdmittedTurn, done_tokens: int) -> None:
        """Correct a turn's load by what its node has reported of its prompt."""
        first = placed.first
        done_tokens = max(done_tokens, first.cached_tokens)
        self._fleet.note_progress(placed.entry, first.prompt_tokens, done_tokens)

    async def _admit_counted(
        self, turn: TurnRequest, waiting: AwaitedNodes
    ) -> tuple[AdmittedTurn, Span]:
        """Return the turn on its node and its span, which the caller ends."""
        turn_span = begin_turn_span(self._fleet, turn)
        try:
            with about_trace(turn_span.trace):
                placed = await self._admit(turn, waiting)
        except BaseException as error:
            turn_span.end(failure_of(error))
            raise
        alias = self._fleet.alias((turn.tenant, placed.first.agent))
        note_admission_in(turn_span, placed.first, alias)
        self.accounts.note_admission(turn.tenant, placed.first)
        return placed, turn_span

    async def _admit(
        self, turn: TurnRequest, waiting: AwaitedNodes, *, goes_first: bool = False
    ) -> AdmittedTurn:
        """Send the turn to nodes until one admits it."""
        attempt = Attempt(self._now_s(), waiting, goes_first)
        while True:
            key = turn.key
            await self._await_ownership(turn, attempt)
            target = self._choose(turn, attempt)
            if target.move is not None:
                attempt.has_moved, attempt.move = True, target.move
                began_s = self._now_s()
                await self._move_first(turn, target.move)
                attempt.moved_s += self._now_s() - began_s
                continue
            try:
                waits = attempt.waits_for_place(turn)
                placed = await self._send(turn, target, attempt, waits=waits)
            except StaleTargetError:
                attempt.has_waited = True  # it waited its turn, so it does not queue again
            except NodeLostError as error:
                await self._wait_or_give_up(turn, target, attempt, error)
            except RetryElsewhereError as error:
                if attempt.has_refreshed:
                    message = "the agent's owner is being decided"
                    raise RetryLaterError(message, code=error.code) from None
                attempt.has_refreshed = True
                await self._fleet.membership.refresh()
            except OverloadedError as error:
                full = self.queues.full(turn.tenant, turn.priority)
                attempt.note_full(target.node, error, full)
            except RetryLaterError:
                if key is None or not self._moves.is_moving(key):
                    raise  # during a move, nodes refuse the agent's turns until it ends
                await asyncio.sleep(RETRY_S)
            else:
                if key is not None or self._is_current(turn, placed):
                    return replace(
                        placed, decision=attempt.decision_of(target.node, target.decision)
                    )
                turn = await self._cancel_and_name(turn, placed)

    def _choose(self, turn: TurnRequest, attempt: Attempt) -> Target:
        may_move = not (attempt.has_moved or attempt.goes_first or turn.resume)
        given_up, full = frozenset(attempt.given_up), frozenset(attempt.full)
        try:
            with span("placement") as placement_span:
                target = self._targets.choose(turn, given_up, full, may_move=may_move)
                placement_span.note(**target.facts())
        except RetryLaterError:
            if attempt.full:
                raise attempt.refusal() from None
            raise
        return target

    def _is_current(self, turn: TurnRequest, placed: AdmittedTurn) -> bool:
        first = placed.first
        if not turn.is_kept:
            return True
        return first.epoch >= self._directory.issued_epoch((turn.tenant, first.agent))

    async def _cancel_and_name(self, turn: TurnRequest, placed: AdmittedTurn) -> TurnRequest:
        """Cancel a turn that found its agent by content at an old epoch, and name the agent.

        Content does not determine the epoch, so every further try would be fenced, too.
        """
        placed.end()
        await placed.source.aclose()
        return replace(turn, identity=Identity(IdentityKind.AGENT, placed.first.agent))

    async def _send_ahead(self, turn: TurnRequest, key: AgentKey) -> AdmittedTurn | None:
        """Let a handed-over turn wait on the move's target while the move is committed."""
        handover_target = await self._moves.handover_target(key)
        if handover_target is None:
            return None
        target = Target(handover_target.node, handover_target.epoch, waits=True)
        handover = asyncio.create_task(self._moves.wait_for_handover(key, handover_target))
        try:
            async with asyncio.timeout(None) as patience:
                handover.add_done_callback(partial(give_up_unless, patience))
                ahead = replace(turn, after=handover_target.migration)
                return await self._send(ahead, target, Attempt(self._now_s(), AwaitedNodes()))
        except (FabricError, TimeoutError) as error:
            alias = self._fleet.alias(key)
            _LOG.info(
                "agent %s: its turn was not handed over at once (%s)", alias, type(error).__name__
            )
            return None
        finally:
            handover.cancel()

    async def _await_ownership(self, turn: TurnRequest, attempt: Attempt) -> None:
        """Wait for nodes' first reports, for the agent's move, and for earlier turns of it."""
        key, directory = turn.key, self._fleet.directory
        # The known owner may have lost the agent to a node that has not reported yet.
        await self._fleet.discovery.wait_for_reports()
        if not attempt.goes_first:
            await self._owner_wait.wait(turn, attempt.started_s, attempt.waiting)
        if key is None:
            return
        await self._moves.wait_until_served(key)
        while self._resuming[key] and not attempt.goes_first:  # noqa: ASYNC110 - a moment only
            await asyncio.sleep(RESUMING_POLL_S)  # a partly answered turn goes first
        owner = directory.owner(key)
        if owner is not None and owner.state is OwnerState.SEALED:
            await self._resolve(key)

    async def _move_first(self, turn: TurnRequest, move: Decision) -> None:
        """Move an idle agent to the node that serves its turn sooner; a failure is no error.

        A move that takes longer than expected continues, while the owner serves the turn.
        """
        assert move.ship is not None, "a move has a transfer"
        assert move.agent is not None, "a move names its agent"
        fleet, ship, key = self._fleet, move.ship, (turn.tenant, move.agent)
        alias = fleet.alias(key)
        _LOG.info("agent %s moves first: %.1f s sooner on %s", alias, move.gain_s, ship.target)
        fleet.activity.note_move(key)
        entry = fleet.ledger.begin(ship.target, move.terms.prefill_s, cold=False)
        try:
            async with asyncio.timeout(MOVE_START_S + MOVE_TIMEOUT_FACTOR * ship.travel_s):
                with fleet.ledger.shipping(ship):
                    await self._moves.migrate(*key, ship.target, holds=False)
        except (FabricError, TimeoutError) as error:
            reason = getattr(error, "code", "slow")
            _LOG.info("agent %s: its turn does not wait for the move (%s)", alias, reason)
        finally:
            fleet.ledger.end(entry)

    async def _send(
        self, turn: TurnRequest, target: Target, attempt: Attempt, *, waits: bool = False
    ) -> AdmittedTurn:
        """Send a turn to its node, with `waits` once the node has a place for it.

        Raise StaleTargetError if its agent has moved meanwhile.
        """
        fleet, reservation = self._fleet, target.reservation
        is_private = turn.key is not None and self._directory.is_private(turn.key)
        if reservation:
            reservation.turns_count += 1
        entry = fleet.ledger.begin(target.node, target.prefill_s, cold=target.is_cold)
        source: AsyncGenerator[Event, None] | None = None
        lent = fleet.ledger.fetching(target.decision)
        try:
            with lent, announce_prompt(fleet, turn, target, is_private=is_private):
                place = await self._place(turn, target) if waits else None
                try:
                    request = self._request(turn, target, attempt)
                    source = fleet.link(target.node).generate(request)
                    first = admission_of(await anext(source), target.node)
                    if place is not None:
                        place.leave(is_admitted=True)
                finally:
                    if place is not None:
                        place.leave()
        except BaseException:
            fleet.ledger.end(entry)
            self._release_reservation(turn, reservation)
            if source is not None:
                await source.aclose()
            raise
        if reservation:
            reservation.epoch = first.epoch
        if turn.is_kept:
            self._note_admission(turn, first)

        def end() -> None:
            if entry.open:  # a turn that was handed over has been ended before
                self._release_reservation(turn, reservation)
            fleet.ledger.end(entry)

        return AdmittedTurn(first, source, entry, end)

    def _request(self, turn: TurnRequest, target: Target, attempt: Attempt) -> GenerateRequest:
        directory, defaults = self._directory, self._fleet.sampling_defaults(target.node)
        is_private = turn.key is not None and directory.is_private(turn.key)
        weight = self.queues.weight(turn.tenant)
        member = self._fleet.membership.find(target.node)
        view = member.view if member is not None else None
        names_turns = view is not None and view.build
        trace = current_trace() if view is not None and view.reads_origins else None
        return turn.request(
            target.epoch,
            directory.floor,
            is_private=is_private,
            weight=weight,
            defaults=defaults,
            head=target.head,
            tag=attempt.tag(turn, self._fleet.clock, trace) if names_turns else None,
        )

    async def _place(self, turn: TurnRequest, target: Target) -> Place:
        """Return a turn's place at its node; raise StaleTargetError if its agent has moved."""
        answer_tokens = min(turn.sampling.max_tokens, ANSWER_TOKENS)
        work_s = target.prefill_s + answer_tokens / self._fleet.decode_tokens_per_s(target.node)
        with span("queue", node=target.node, priority=turn.priority.value):
            place = await self.queues.enter(target.node, turn.tenant, turn.priority, work_s)
        if place.had_to_wait and self._is_stale(turn, target):
            place.leave()
            raise StaleTargetError
        return place

    def _is_stale(self, turn: TurnRequest, target: Target) -> bool:
        """Return whether a turn's agent is elsewhere since its target was chosen."""
        key = turn.key
        if key is None:
            return False  # the node finds the agent by content
        owner = self._directory.owner(key)
        has_changed = owner is not None and (owner.node, owner.epoch) != (target.node, target.epoch)
        return has_changed or self._moves.is_moving(key)

    def _note_admission(self, turn: TurnRequest, first: Admitted) -> None:
        tenant, agent = key = turn.tenant, first.agent
        owner = self._directory.owner(key)
        group = owner.group if owner else None
        if turn.identity.kind is IdentityKind.GROUP:
            group = turn.identity.agent
        self._fleet.note_holding(key, first.node, first.epoch, OwnerState.OWNED, group)
        prompt = turn.prompt
        form = prompt.form if turn.key is None else None  # named agents are not found by content
        put = partial(self._fleet.sketches.put, opening=prompt.opening, form=form)
        is_coming = first.prompt_tokens - first.cached_tokens > BLOCK_TOKENS
        put(tenant, first.node, agent, prompt.sketch, is_coming=is_coming)

    def _release_reservation(self, turn: TurnRequest, reservation: StartReservation | None) -> None:
        if reservation:
            assert turn.key is not None, "only a named agent is reserved"
            self._directory.release(turn.key, reservation)

    async def _wait_or_give_up(
        self, turn: TurnRequest, target: Target, attempt: Attempt, error: NodeLostError
    ) -> None:
        now_s = self._now_s()
        if attempt.lost_since_s is None:
            attempt.lost_since_s = now_s
        # The address did not answer: it may have changed.
        self._fleet.membership.nudge(target.node, whole=True)
        patience_s = self._takeover_after_s if target.waits else 0.0
        is_returning = self._fleet.membership.is_returning(target.node)
        if target.waits and is_returning:
            # Its KV cache returns with it: wait as long as recomputing the prompt would take.
            recompute_s = self._targets.recompute_s(turn, without=target.node)
            patience_s = max(patience_s, min(recompute_s, OWNER_WAIT_S_MAX))
        is_down = not is_returning and not self._fleet.is_up(target.node)
        if is_down or now_s - attempt.lost_since_s >= patience_s:
            _LOG.warning("gave up on %s: %s", target.node, error.code)
            attempt.given_up.add(target.node)
            attempt.lost_since_s = None
        else:
            await asyncio.sleep(RETRY_S)

    async def _resolve(self, key: AgentKey) -> None:
        """Decide a sealed agent's owner; raise RetryLaterError if that is not possible yet."""
        await self._recovery.resolve(key)
        owner = self._directory.owner(key)
        if owner and owner.state is OwnerState.SEALED and self._fleet.is_up(owner.node):
            message = "the agent is being moved to another node"
            raise RetryLaterError(message, retry_after_s=2.0, code="agent_moving")

    @property
    def _directory(self) -> Directory:
        return self._fleet.directory

    def _now_s(self) -> float:
        return self._fleet.clock.monotonic_s()


def _discard(_event: FleetEvent) -> None:
    """No-op publisher for turns that are not kept."""
