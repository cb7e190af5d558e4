"""One turn of one agent: claim, match, restore, prefill, decode, save.

Runs as its own task, so that a client that hangs up ends the decoding but never leaves an
agent half-saved. Events go to a bounded queue; a client that does not read is dropped.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from fabric.control.node_calls import SealAgent
from fabric.errors import FabricError, HungUpError, RejectedError, StaleEpochError
from fabric.ids import MigrationId
from fabric.record.directive import Directive
from fabric.record.lenders import Lender
from fabric.record.manifest import Manifest
from fabric.turn.generation import (
    CacheTier,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    HandedOver,
    Prefilling,
    Resumption,
)
from fabric.turn.prompt_limit import PromptLimit
from node.agents.agent import Agent, HandedOn
from node.agents.outgoing import OutgoingMove
from node.dialect.folding import Rendered
from node.dialect.shown import Shown
from node.engine.delivery import finish_reason, produced
from node.engine.engine_thread import EngineThread
from node.engine.sequence import Broke, Computed, Ended, Produced, Sequence, SequenceEvent, Started
from node.grammar.answer_matcher import AnswerMatcher
from node.limits import STREAM_EVENTS_MAX
from node.mlx.answer import Answer
from node.mlx.engine import SampledToken
from node.prompt.answer_grammars import AnswerGrammars
from node.prompt.directed_request import DirectedRequest, direct, upon
from node.prompt.prompt_encoder import PromptEncoder
from node.prompt.restored_answers import LocatedRequest, RestoredRequest, ShownAnswer, put_back
from node.prompt.transcript_positions import planned
from node.runtime.health import Health
from node.runtime.live_turns import LiveTurns
from node.turn.claim import Claims
from node.turn.prefix import Prefixes
from node.turn.prepared import Prepared
from node.turn.resumption import plan_resumption, resumption, without_answer
from node.turn.saver import Saver, Savers
from node.turn.shown_events import echo_events, shown_events
from node.turn.turn_sequence import Sequences, end_of, is_unchanged

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnServer:
    """Server of a node's turns, with the parts that all of them use."""

    prompts: PromptEncoder
    grammars: AnswerGrammars
    claims: Claims
    prefixes: Prefixes
    sequences: Sequences
    savers: Savers
    engine: EngineThread
    live: LiveTurns
    health: Health

    def serve(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Serve one turn; closing the iterator cancels it."""
        return Turn(self, request).events()


class Turn:
    """One request being served."""

    def __init__(self, parts: TurnServer, request: GenerateRequest) -> None:
        self._parts = parts
        self._engine = parts.engine
        self._request = request
        self._queue: asyncio.Queue[Event | FabricError | None] = asyncio.Queue()
        self._sequence: Sequence | None = None
        self._matcher: AnswerMatcher | None = None  # of an answer whose format is prescribed
        self._unwanted = threading.Event()  # nobody listens any more
        self._folds: tuple[str, ...] = ()  # what was done to the messages for the template
        self._is_waiting = False  # for its prompt's tokens or its agent
        self._is_behind = False  # the reader: what it has not read was dropped
        self._outgoing: OutgoingMove | None = None  # its agent's, once it has it
        self._is_saving = False
        self.saved = asyncio.Event()  # its record is published, or nothing more comes of it
        self._saver: Saver | None = None
        self.lenders: tuple[Lender, ...] = ()  # whose rows its cache borrowed
        self._shown = ShownAnswer()
        self._directed = DirectedRequest(request)  # as directives have it
        self.task = asyncio.create_task(self._run())
        parts.live.add(self)

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
            self._engine.wake()

    async def save_now(self) -> Manifest | None:
        """Save what the turn has so far; return a record of it, published nowhere."""
        if self._saver is None or self._sequence is None:
            return None
        return await self._saver.save_now(list(self._sequence.answer_ids))

    def hand_over(self, seal: SealAgent) -> None:
        """Stop between two tokens, saved and sealed, so that the turn goes on elsewhere."""
        assert self._outgoing is not None, "its agent was asked for it"
        self._outgoing.ask(seal)
        if self._sequence is not None:
            self._engine.moving.fall_silent(seal.migration)
            self._sequence.yielding.set()
            self._engine.wake()

    async def keep(self, migration: MigrationId) -> None:
        """Forget the seal of a move that came to nothing, or wait until it can be undone."""
        if self._outgoing is None or not self._outgoing.is_asked(migration):
            return
        if self._is_saving:
            await asyncio.wait([self.task])
        else:
            self._outgoing.stop_asking()

    def _admit(self, agent: Agent, prepared: Prepared) -> None:
        self._emit(replace(self._parts.prefixes.admitted(agent, prepared), template=self._folds))

    def _emit(self, event: Event) -> None:
        is_last = isinstance(event, Finished | HandedOver)
        if self._queue.qsize() >= STREAM_EVENTS_MAX and not is_last:
            self._is_behind = True
            self.cancel()
        if not self._is_behind:  # behind what was dropped nothing follows but the end
            self._queue.put_nowait(event)

    def _fail(self, error: FabricError) -> None:
        stopping = self._parts.health.stopping if isinstance(error, HungUpError) else None
        # Unread, its traceback's frames would keep the cache, and through this queue themselves.
        self._queue.put_nowait((stopping or error).with_traceback(None))

    async def _run(self) -> None:
        try:
            last = await self._claim_and_serve()
            if self._is_behind:
                message = f"the reader was more than {STREAM_EVENTS_MAX} events behind"
                raise RejectedError(message, code="slow_reader")  # noqa: TRY301 - as any other end
            if last is not None:
                self._emit(last)
        except FabricError as error:
            self._fail(error)
        except asyncio.CancelledError:  # while it waited
            if not self._unwanted.is_set():
                raise
            self._fail(HungUpError())
        except Exception:  # noqa: BLE001 - nothing may end the loop
            _log.exception("a turn failed")
            self._fail(FabricError("the node failed on this request"))
        finally:
            self._parts.live.discard(self)
            if self._outgoing is not None:
                self._engine.moving.go_on(self._outgoing.stop_asking())
            self.saved.set()
            self._queue.put_nowait(None)

    async def _claim_and_serve(self) -> Finished | HandedOver | None:
        """Return the last event; only when the agent is idle, so that its next turn finds it so."""
        parts, request = self._parts, self._request
        if parts.health.stopping is not None or self._unwanted.is_set():
            raise HungUpError
        self._is_waiting = True
        parts.prompts.check_sampling(request.sampling)
        if not request.was_admitted:
            self._engine.check_waiting(request.tenant, request.priority)
        limit = parts.prompts.limit(self._unwanted.is_set)
        found = await parts.prompts.located(request)
        self._shown.places, self._shown.restores = found.places, found.restores
        directives = parts.claims.directives(found.request)
        rendered, answer = await self._spelled(found, directives, limit)
        async with parts.claims.hold(self._directed.request, rendered.text) as agent:
            self._is_waiting = False
            agent.turn, self._outgoing = self, agent.outgoing
            try:
                told = parts.claims.directives(found.request)
                if told != directives and request.resume is None:  # it came here meanwhile
                    rendered, answer = await self._spelled(found, told, limit)
                last = await self._serve(agent, rendered, answer, limit)
            finally:
                agent.turn = None
            if isinstance(last, HandedOver) and last.resume is not None:
                agent.handed_on = HandedOn(agent.manifest.epoch)
            return last

    async def _spelled(
        self, found: LocatedRequest, directives: tuple[Directive, ...], limit: PromptLimit
    ) -> tuple[Rendered, Answer]:
        made = await spell_turn(self._parts, found, directives, limit, self._shown)
        rendered, self._directed = made.rendered, made.directed
        self._request, self._folds = made.restored.request, rendered.notes
        self._shown.put_back = made.restored.answers
        self._matcher = await self._parts.grammars.begin(made.directed.request, rendered.text)
        return rendered, made.answer

    async def _serve(
        self, agent: Agent, rendered: Rendered, answer: Answer, limit: PromptLimit
    ) -> Finished | HandedOver | None:
        parts = self._parts
        self._directed = upon(self._directed, agent.manifest)
        request = self._directed.request
        if request.resume is not None:
            made = plan_resumption(agent.manifest, request.resume)
        else:
            directed = self._directed
            made, self._directed = await parts.prompts.encoders.run(
                lambda: planned(parts.prompts, directed, agent.manifest, rendered, limit),
                len(rendered.text),
            )
        parts.prompts.check_plan(request, made)
        self._engine.budget.check(parts.sequences.identity.spec.resident_bytes(len(made.ids)))
        prepared = await parts.prefixes.prepare(agent, made, request)
        self.lenders = parts.claims.lenders(agent, prepared.layout)
        events: asyncio.Queue[SequenceEvent] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: SequenceEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        sequence = parts.sequences.make(request, prepared, answer, emit)
        sequence.matcher = self._matcher
        self._submit(agent, sequence, prepared)
        try:
            return await self._decode(agent, prepared, sequence, events)
        finally:
            # They hold the cache, and whoever reads the events slowly holds them.
            sequence.granted = sequence.reached = None
            self._sequence = self._saver = None
            parts.sequences.release(sequence)

    def _submit(self, agent: Agent, sequence: Sequence, prepared: Prepared) -> None:
        """Hand the sequence and the agent's cache to the engine, or neither."""
        self._sequence = sequence
        if self._unwanted.is_set():
            sequence.cancelled.set()
        if agent.outgoing.seal is not None:
            sequence.yielding.set()
        self._parts.sequences.submit(agent, sequence, prepared)

    async def _decode(
        self,
        agent: Agent,
        prepared: Prepared,
        sequence: Sequence,
        events: "asyncio.Queue[SequenceEvent]",
    ) -> Finished | HandedOver | None:
        before, epoch = agent.manifest, agent.manifest.epoch
        begun = await self._begun(agent, prepared, sequence, events)
        if not isinstance(begun, Prepared):
            return self._unbegun(agent, prepared, sequence, begun)
        prepared = begun
        if self._request.resume is not None:
            prepared = replace(prepared, plan=without_answer(prepared.plan, before))
        self._saver = saver = self._parts.savers.of(agent, prepared, self._request, self._directed)
        sequence.is_blocked = saver.is_behind
        saver.begin(is_decoding=sequence.slot is not None)
        ended = await self._follow(events, saver)
        if isinstance(ended, Broke):
            await saver.abandon()
            raise ended.error
        gone = self._parts.claims.lender_gone(agent, self.lenders)
        if gone is not None or agent.outgoing.fence > epoch:
            await saver.abandon()
            raise gone or self._fenced(agent)
        resume = self._show_sampled(sequence, ended) if ended.is_handover else None
        if ended.reason is None and is_unchanged(agent, sequence, prepared):
            await saver.abandon()
            return self._unbegun(agent, prepared, sequence, ended)
        self._is_saving = True
        durable = await saver.commit(ended, self._shown, agent.outgoing.begin_sealing())
        self.saved.set()
        if agent.outgoing.fence > epoch and not ended.is_handover:
            raise self._fenced(agent)
        if ended.is_handover:
            return HandedOver(resume)
        if ended.reason is None:
            self._cancelled()
            return None
        reason = FinishReason.TOOL_CALLS if sequence.answer.has_calls else ended.reason
        broken = sequence.answer.broken_calls
        return Finished(reason, len(ended.answer_ids), ended.stop_string, durable, broken)

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
        parts = self._parts
        if prepared.source is None:  # how much is reused is known already
            self._admit(agent, prepared)
        if sequence.awaited_tokens is not None:
            granted = await events.get()
            if isinstance(granted, Ended | Broke):
                return granted
        if prepared.source is None:
            return prepared
        try:
            prepared = await parts.prefixes.restore(agent, prepared, sequence.cache, self._unwanted)
        except Exception:
            sequence.cancelled.set()
            self._engine.wake()
            await end_of(events)
            raise
        if self._unwanted.is_set():
            return await end_of(events)
        sequence.stops = parts.sequences.stops_of(prepared)
        sequence.awaited_tokens = None
        self._engine.wake()
        self._admit(agent, prepared)
        return prepared

    def _unbegun(
        self, agent: Agent, prepared: Prepared, sequence: Sequence, ended: Ended | Broke
    ) -> HandedOver | None:
        """End a turn of which nothing was computed: the agent is as it was."""
        if isinstance(ended, Broke):
            raise ended.error
        if agent.outgoing.fence > agent.manifest.epoch:
            raise self._fenced(agent)
        is_whole = prepared.cached == agent.manifest.tokens_count == prepared.cache.tokens_count
        if prepared.tier is CacheTier.HOT and (is_whole or sequence.awaited_tokens is not None):
            agent.cache = prepared.cache
        if ended.is_handover:
            if prepared.source is not None:  # it was to be told once it is restored
                self._admit(agent, prepared)
            return HandedOver(resumption(sequence, ended))
        self._cancelled()
        return None

    def _cancelled(self) -> None:
        """End a turn to which nobody listens, unless it was the node that ended it."""
        if self._parts.health.stopping is not None:
            raise self._parts.health.stopping

    def _fenced(self, agent: Agent) -> StaleEpochError:
        """Count and describe a turn that ended when its agent was another node's."""
        self._parts.live.fenced_count += 1
        return self._parts.claims.lost(agent)

    def _show_sampled(self, sequence: Sequence, ended: Ended) -> Resumption | None:
        """Say how to go on elsewhere, and show the token that is sampled already.

        The next node has to compute the one behind it before it would come to show this one.
        """
        resume, shown = resumption(sequence, ended), ended.sampled_shown
        if resume is None or shown is None or resume.is_delivered:
            return resume
        count = len(resume.answer_ids) + 1
        if finish_reason(sequence, count, resume.sampled, shown) is not None:
            return resume  # who goes on will see that it was the last
        event = produced(sequence, count, SampledToken(resume.sampled, resume.top), shown)
        self._show(event.index, shown, event)
        return replace(resume, is_delivered=True)

    async def _follow(self, events: "asyncio.Queue[SequenceEvent]", saver: Saver) -> Ended | Broke:
        index = 0
        while True:
            event = await events.get()
            if isinstance(event, Started):
                saver.note_decoding()
                for each in echo_events(self._sequence):
                    self._emit(each)
            elif isinstance(event, Computed):
                self._emit(Prefilling(event.tokens_count))
            elif isinstance(event, Produced):
                index = event.index
                self._show(index, event.shown, event)
            elif isinstance(event, Ended | Broke):
                if isinstance(event, Ended) and not event.is_handover:
                    self._show(index, event.shown, None)
                return event

    def _show(self, index: int, shown: Shown, event: Produced | None) -> None:
        self._shown.add(shown)
        if event is not None and event.was_delivered:
            return
        for each in shown_events(index, shown, event.logprobs if event is not None else ()):
            self._emit(each)


@dataclass(frozen=True, slots=True)
class SpelledTurn:
    """What a turn is rendered from, and the answer to it, which is begun."""

    restored: RestoredRequest
    directed: DirectedRequest
    rendered: Rendered
    answer: Answer


async def spell_turn(
    parts: TurnServer,
    found: LocatedRequest,
    directives: tuple[Directive, ...],
    limit: PromptLimit,
    shown: ShownAnswer,
) -> SpelledTurn:
    """Spell a turn as these directives have it; raise RejectedError where that is no prompt."""
    known = parts.claims.answers(found.request, found.wanted)
    salt = parts.prefixes.store.salt(found.request.tenant)

    def spelled() -> SpelledTurn:
        restored = put_back(found, known)
        directed = direct(restored.request, directives, restored.note, salt, found.request.messages)
        rendered = parts.prompts.render(directed.request, limit)
        answer = parts.sequences.begin_answer(directed.request, rendered.text, shown)
        return SpelledTurn(restored, directed, rendered, answer)

    return await parts.prompts.encoders.run(spelled)
