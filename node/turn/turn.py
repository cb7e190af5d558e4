"""One turn of one agent: claim, match, restore, prefill, decode, save.

Runs as its own task, so that a client that hangs up ends the decoding but never leaves an
agent half-saved. Events go to a bounded queue; a client that does not read is dropped.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from fabric.control.node_calls import LastMatch, SealAgent
from fabric.errors import FabricError, RejectedError, StaleEpochError
from fabric.ids import MigrationId
from fabric.limits import STREAM_EVENTS_MAX
from fabric.record.manifest import Manifest
from fabric.turn.generation import (
    Admitted,
    CacheTier,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    HandedOver,
    MatchKind,
    Resumption,
    ToolCalls,
)
from fabric.turn.prompt_limit import PromptLimit
from node.agents.agent import Agent, HandedOn
from node.engine.delivery import finish_reason, produced
from node.engine.memory_budget import Reservation
from node.engine.sequence import Broke, Ended, Produced, Sequence, SequenceEvent, Started
from node.mlx.answer import Answer, Shown
from node.mlx.engine import Drawn
from node.turn.claim import claimed
from node.turn.prefix import Prepared, prepare, restore
from node.turn.request_prompt import check_plan, check_sampling, plan
from node.turn.resumption import plan_resumption, resumption, without_answer
from node.turn.saver import Saver
from node.turn.turn_sequence import (
    begin_answer,
    end_of,
    is_unchanged,
    make_sequence,
    stops_of,
)

if TYPE_CHECKING:
    from node.node import Node

_log = logging.getLogger(__name__)
HUNG_UP: Final = "the client hung up"


class Turn:
    """One request being served."""

    def __init__(self, node: "Node", request: GenerateRequest) -> None:
        self._node = node
        self._request = request
        self._queue: asyncio.Queue[Event | FabricError | None] = asyncio.Queue()
        self._sequence: Sequence | None = None
        self._unwanted = threading.Event()  # nobody listens any more
        self._is_waiting = False  # for its prompt's tokens or its agent
        self._is_behind = False  # the reader: what it has not read was dropped
        self._seal: SealAgent | None = None  # the move that waits for its end
        self._is_saving = False
        self.saved = asyncio.Event()  # its record is published, or nothing more comes of it
        self._saver: Saver | None = None
        node.turns.add(self)
        node.turns_begun += 1
        self.task = asyncio.create_task(self._run())

    async def events(self) -> AsyncIterator[Event]:
        """Yield events; raise FabricError if the turn fails before its first one."""
        first = True
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, FabricError):
                    if first:
                        raise item
                    item = Failed(int(item.status), item.code, item.message)
                first = False
                yield item
        finally:
            item = None  # an error's traceback holds this frame, and the turn's own
            self.cancel()

    def cancel(self) -> None:
        """Stop waiting, encoding or decoding; what was computed is saved."""
        self._unwanted.set()
        if self._is_waiting:
            self.task.cancel()
        elif self._sequence is not None:
            self._sequence.cancelled.set()
            self._node.engine.wake()

    async def save_now(self) -> Manifest | None:
        """Save what the turn has so far; return a record of it, published nowhere."""
        if self._saver is None or self._sequence is None:
            return None
        return await self._saver.save_now(list(self._sequence.answer_ids))

    def hand_over(self, seal: SealAgent) -> None:
        """Stop between two tokens, saved and sealed, so that the turn goes on elsewhere."""
        self._seal = seal
        if self._sequence is not None:
            self._node.engine.moving.fall_silent(seal.migration)
            self._sequence.yielding.set()
            self._node.engine.wake()

    async def keep(self, migration: MigrationId) -> None:
        """Forget the seal of a move that came to nothing, or wait until it can be undone."""
        if self._seal is None or self._seal.migration != migration:
            return
        if self._is_saving:
            await asyncio.wait([self.task])
        else:
            self._seal = None

    def _emit(self, event: Event) -> None:
        is_last = isinstance(event, Finished | HandedOver)
        if self._queue.qsize() >= STREAM_EVENTS_MAX and not is_last:
            self._is_behind = True
            self.cancel()
        if not self._is_behind:  # behind what was dropped nothing follows but the end
            self._queue.put_nowait(event)

    async def _run(self) -> None:
        try:
            last = await self._claim_and_serve()
            if self._is_behind:
                message = f"the reader was more than {STREAM_EVENTS_MAX} events behind"
                raise RejectedError(message, code="slow_reader")  # noqa: TRY301 - as any other end
            if last is not None:
                self._emit(last)
        except FabricError as error:
            self._queue.put_nowait(error)
        except asyncio.CancelledError:  # while it waited
            if not self._unwanted.is_set():
                raise
            self._queue.put_nowait(self._node.stopping or FabricError(HUNG_UP, code="cancelled"))
        except Exception:  # noqa: BLE001 - nothing may end the loop
            _log.exception("a turn failed")
            self._queue.put_nowait(FabricError("the node failed on this request"))
        finally:
            self._node.turns.discard(self)
            self._node.engine.moving.go_on(self._seal.migration if self._seal else None)
            self.saved.set()
            self._queue.put_nowait(None)

    async def _claim_and_serve(self) -> Finished | HandedOver | None:
        """Return the last event; only when the agent is idle, so that its next turn finds it so."""
        node, request = self._node, self._request
        if node.stopping is not None or self._unwanted.is_set():
            raise node.stopping or FabricError(HUNG_UP, code="cancelled")
        self._is_waiting = True
        check_sampling(node, request.sampling)
        if request.resume is None:
            node.engine.check_waiting(request.tenant, request.priority)
        reach_bytes = node.tokenizer.reach_bytes
        limit = PromptLimit(node.context_tokens_max, reach_bytes, self._unwanted.is_set)

        text, answer = await node.encoders.run(lambda: begin_answer(node, request, limit))
        async with claimed(node, request, text) as agent:
            self._is_waiting = False
            agent.turn = self
            try:
                last = await self._serve(agent, text, answer, limit)
            finally:
                agent.turn = None
            if isinstance(last, HandedOver) and last.resume is not None:
                agent.handed_on = HandedOn(agent.manifest.epoch)
            return last

    async def _serve(
        self, agent: Agent, text: str, answer: Answer, limit: PromptLimit
    ) -> Finished | HandedOver | None:
        node, request = self._node, self._request
        if request.resume is not None:
            made = plan_resumption(agent.manifest, request.resume)
        else:
            made = await node.encoders.run(
                lambda: plan(node, request, agent, text, limit), len(text)
            )
        check_plan(node, request, made)
        prepared = await prepare(node, agent, made, request.sampling.max_tokens)
        events: asyncio.Queue[SequenceEvent] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: SequenceEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        sequence = make_sequence(node, request, prepared, answer, emit)
        self._submit(agent, sequence, prepared)
        try:
            return await self._decode(agent, prepared, sequence, events)
        finally:
            assert sequence.reservation is not None, "made when it was submitted"
            # They hold the cache, and whoever reads the events slowly holds them.
            sequence.granted = sequence.reached = None
            self._sequence = self._saver = None
            sequence.reservation.release()
            node.note_hot()
            node.engine.wake()

    def _submit(self, agent: Agent, sequence: Sequence, prepared: Prepared) -> None:
        """Hand the sequence and the agent's cache to the engine, or neither."""
        node, cache = self._node, prepared.cache
        budget = node.engine.budget
        self._sequence = sequence
        if self._unwanted.is_set():
            sequence.cancelled.set()
        if self._seal is not None:
            sequence.yielding.set()
        sequence.reservation = reservation = Reservation(budget)
        reservation.count(cache.size_bytes)
        try:
            node.engine.submit(sequence)
        except FabricError:
            reservation.release()
            raise
        agent.cache = None
        node.note_hot()
        needs_bytes = max(0, sequence.reserve_bytes - cache.size_bytes)
        if budget.claimable_bytes - budget.idle_bytes < needs_bytes <= budget.claimable_bytes:
            node.make_room(needs_bytes)

    async def _decode(
        self,
        agent: Agent,
        prepared: Prepared,
        sequence: Sequence,
        events: "asyncio.Queue[SequenceEvent]",
    ) -> Finished | HandedOver | None:
        node, before, epoch = self._node, agent.manifest, agent.manifest.epoch
        begun = await self._begun(agent, prepared, sequence, events)
        if not isinstance(begun, Prepared):
            return self._unbegun(agent, prepared, sequence, begun)
        prepared = begun
        if self._request.resume is not None:
            prepared = replace(prepared, plan=without_answer(prepared.plan, before))
        self._saver = saver = Saver(node, agent, prepared, self._request)
        sequence.is_blocked = saver.is_behind
        saver.begin(is_decoding=sequence.slot is not None)
        ended = await self._follow(events, saver)
        if isinstance(ended, Broke):
            await saver.abandon()
            raise ended.error
        if agent.fence > epoch:
            await saver.abandon()
            raise self._fenced(agent)
        resume = self._show_drawn(sequence, ended) if ended.is_handover else None
        if ended.reason is None and is_unchanged(agent, sequence, prepared):
            await saver.abandon()
            return self._unbegun(agent, prepared, sequence, ended)
        self._is_saving = True
        durable = await saver.commit(ended, self._seal)
        self.saved.set()
        if agent.fence > epoch and not ended.is_handover:
            raise self._fenced(agent)
        if ended.is_handover:
            return HandedOver(resume)
        if ended.reason is None:
            self._cancelled()
            return None
        reason = FinishReason.TOOL_CALLS if sequence.answer.has_calls else ended.reason
        return Finished(reason, len(ended.answer_ids), ended.stop_string, durable)

    def _admit(self, agent: Agent, prepared: Prepared) -> Admitted:
        """Note and tell how much of the prompt is known already."""
        node, plan, cached = self._node, prepared.plan, prepared.cached
        reason = plan.reason
        if node.problem is not None:
            reason = f"served without reuse: {node.problem}"
        match = plan.match if cached else MatchKind.NONE
        if cached and match is MatchKind.NONE:
            match = MatchKind.DIVERGE  # it begins like another conversation
        agent.last_match = LastMatch(match, cached, len(plan.ids), reason)
        agent.came_from_peer = False
        return Admitted(
            agent=agent.manifest.agent,
            node=node.name,
            epoch=agent.manifest.epoch,
            cache=prepared.tier,
            match=match,
            prompt_tokens=len(plan.ids),
            cached_tokens=cached,
            match_reason=reason,
        )

    async def _begun(
        self,
        agent: Agent,
        prepared: Prepared,
        sequence: Sequence,
        events: "asyncio.Queue[SequenceEvent]",
    ) -> Prepared | Ended | Broke:
        """Wait for the memory, and read the prompt's beginning into it if it is on disk.

        Where nobody wants it any more, it is less than it might be: nothing is computed upon it.
        """
        node = self._node
        if prepared.source is None:  # how much is reused is known already
            self._emit(self._admit(agent, prepared))
        if sequence.awaited_tokens is not None:
            granted = await events.get()
            if isinstance(granted, Ended | Broke):
                return granted
        if prepared.source is None:
            return prepared
        try:
            prepared = await restore(node, agent, prepared, sequence.cache, self._unwanted)
        except Exception:
            sequence.cancelled.set()
            node.engine.wake()
            await end_of(events)
            raise
        if self._unwanted.is_set():
            return await end_of(events)
        sequence.stops = stops_of(node, prepared)
        sequence.awaited_tokens = None
        node.engine.wake()
        self._emit(self._admit(agent, prepared))
        return prepared

    def _unbegun(
        self, agent: Agent, prepared: Prepared, sequence: Sequence, ended: Ended | Broke
    ) -> HandedOver | None:
        """End a turn of which nothing was computed: the agent is as it was."""
        if isinstance(ended, Broke):
            raise ended.error
        if agent.fence > agent.manifest.epoch:
            raise self._fenced(agent)
        is_whole = prepared.cached == agent.manifest.tokens_count == prepared.cache.tokens_count
        if prepared.tier is CacheTier.HOT and (is_whole or sequence.awaited_tokens is not None):
            agent.cache = prepared.cache
        if ended.is_handover:
            if prepared.source is not None:  # it was to be told once it is restored
                self._emit(self._admit(agent, prepared))
            return HandedOver(resumption(sequence, ended))
        self._cancelled()
        return None

    def _cancelled(self) -> None:
        """End a turn to which nobody listens, unless it was the node that ended it."""
        if self._node.stopping is not None:
            raise self._node.stopping

    def _fenced(self, agent: Agent) -> StaleEpochError:
        """Count and describe a turn that ended when its agent was another node's."""
        self._node.fenced_turns += 1
        if agent.manifest.epoch <= self._node.erased.floor(*agent.key):
            message = "the agent was erased during this turn"
            return StaleEpochError(message, code="erased")
        message = f"another node took the agent over at epoch {agent.fence}"
        return StaleEpochError(message, code="fenced")

    def _show_drawn(self, sequence: Sequence, ended: Ended) -> Resumption | None:
        """Say how to go on elsewhere, and show the token that is drawn already.

        The next node has to compute the one behind it before it would come to show this one.
        """
        resume, shown = resumption(sequence, ended), ended.drawn_shown
        if resume is None or shown is None or resume.told:
            return resume
        count = len(resume.answer_ids) + 1
        if finish_reason(sequence, count, resume.drawn, shown) is not None:
            return resume  # who goes on will see that it was the last
        event = produced(sequence, count, Drawn(resume.drawn, resume.top), shown)
        self._show(event.index, shown, event)
        return replace(resume, told=True)

    async def _follow(self, events: "asyncio.Queue[SequenceEvent]", saver: Saver) -> Ended | Broke:
        index = 0
        while True:
            event = await events.get()
            if isinstance(event, Started):
                saver.note_decoding()
            elif isinstance(event, Produced):
                index = event.index
                self._show(index, event.shown, event)
            elif isinstance(event, Ended | Broke):
                if isinstance(event, Ended) and not event.is_handover:
                    self._show(index, event.shown, None)
                return event

    def _show(self, index: int, shown: Shown, event: Produced | None) -> None:
        if shown.reasoning:
            self._emit(Delta(index, shown.reasoning, reasoning=True))
        logprobs = event.logprobs if event is not None else ()
        if shown.text or logprobs:
            self._emit(Delta(index, shown.text, logprobs=logprobs))
        if shown.calls:
            self._emit(ToolCalls(tuple(shown.calls)))
