"""Decoding of a turn, the part that holds its agent: plan, restore, prefill, decode, save."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

from fabric.errors import FabricError, StaleEpochError
from fabric.record.lenders import Lender
from fabric.record.turn_history import TurnNote
from fabric.turn.generation import (
    Admitted,
    CacheTier,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    HandedOver,
    Prefilling,
    Resumption,
    TokenLogprob,
    ToolCall,
    ToolCallPart,
    ToolCalls,
)
from node.agents.agent import Agent
from node.dialect.answer_delta import AnswerDelta, ToolCallDelta
from node.engine.decode_step import finish_reason, produced_event
from node.engine.engine_thread import EngineThread
from node.engine.sequence import (
    Awaited,
    Broke,
    Computed,
    Ended,
    Produced,
    Sequence,
    SequenceEvent,
    Started,
)
from node.limits import SCORED_CHUNK_TOKENS
from node.mlx.engine import SampledToken
from node.prompt.continued_prompt import without_answer
from node.prompt.pipeline import PlannedPrompt, PromptPipeline, SpelledPrompt
from node.runtime.health import Health
from node.runtime.live_turns import LiveTurns
from node.runtime.workers import low_latency
from node.turn.claim import Claims
from node.turn.fetched_heads import FetchedHeads, HeadWait
from node.turn.heads import TurnHeads
from node.turn.prefix import Prefixes
from node.turn.prepared import Prepared
from node.turn.saver import Saver, Savers
from node.turn.turn_sequence import Sequences
from node.turn.turn_timer import Part, TurnTimer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnParts:
    """The parts of a node that all of its turns use."""

    prompts: PromptPipeline
    claims: Claims
    prefixes: Prefixes
    sequences: Sequences
    savers: Savers
    heads: TurnHeads
    fetched: FetchedHeads
    engine: EngineThread
    live: LiveTurns
    health: Health


class Decoding:
    """One turn while it holds its agent; used on the node's event loop."""

    def __init__(
        self,
        parts: TurnParts,
        request: GenerateRequest,
        prompt: SpelledPrompt,
        agent: Agent,
        emit: Callable[[Event], None],
        unwanted: threading.Event,
        saved: asyncio.Event,
        timer: TurnTimer,
    ) -> None:
        """Send events to `emit`, stop when `unwanted` is set, set `saved` after publishing."""
        self._timer = timer
        self._admitted: Admitted | None = None
        self._parts = parts
        self._request = request
        self._prompt = prompt
        self._agent = agent
        self._emit = emit
        self._unwanted = unwanted
        self._events: asyncio.Queue[SequenceEvent] = asyncio.Queue()
        self.sequence: Sequence | None = None
        self.saver: Saver | None = None
        self.is_saving = False
        self._saved = saved
        self._ends_count = 0  # ended turns before this one looked for its prefix
        self.lenders: tuple[Lender, ...] = ()  # agents whose rows the cache borrowed
        self._wait: HeadWait | None = None  # wait for blocks of other nodes

    async def run(self) -> Finished | HandedOver | None:
        """Run the turn; return its last event, or None if its client has disconnected."""
        parts, agent = self._parts, self._agent
        planned = await parts.prompts.plan(self._prompt, agent.manifest)
        parts.sequences.check_memory(len(planned.plan.ids))
        request, self._ends_count = planned.directed.request, parts.heads.ends_count
        prepared = await parts.prefixes.prepare(agent, planned.plan, request)
        head = await parts.heads.of(agent, prepared, request)
        if head is not None:
            is_lent = request.head is not None
            prepared = parts.heads.give_up_shorter_cache(agent, prepared, head, is_lent=is_lent)
        self.lenders = parts.claims.lenders(agent, prepared.layout)
        loop, put = asyncio.get_running_loop(), self._events.put_nowait

        def emit(event: SequenceEvent) -> None:
            loop.call_soon_threadsafe(put, event)

        sequence = parts.sequences.make(request, prepared, self._prompt, emit, head)
        self._wait = parts.fetched.begin(agent, request, head)
        if self._wait is not None and self._wait.task is not None:
            self._wait.task.add_done_callback(lambda _: self._timer.note_fetch_end())
        self._timer.spend(Part.PREPARE)
        try:
            self._submit(sequence, prepared)
        except FabricError:
            self._end_wait()
            raise
        try:
            return await self._decode(sequence, planned, prepared)
        finally:
            self._end_wait()
            # A slow reader of the events would keep these callbacks, and with them the cache.
            sequence.granted = sequence.reached = None
            self.sequence = self.saver = None
            parts.sequences.release(sequence)

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._parts.fetched.leave(self._wait)
            self._wait = None

    def _submit(self, sequence: Sequence, prepared: Prepared) -> None:
        """Submit the sequence and the agent's cache to the engine."""
        self.sequence = sequence
        if self._unwanted.is_set():
            sequence.cancelled.set()
        if self._agent.outgoing.seal is not None:
            sequence.yielding.set()
        self._parts.sequences.submit(self._agent, sequence, prepared)
        if sequence.head is not None:
            self._parts.heads.begin(sequence.head, self._agent)

    async def _decode(
        self, sequence: Sequence, planned: PlannedPrompt, prepared: Prepared
    ) -> Finished | HandedOver | None:
        agent, claims = self._agent, self._parts.claims
        before, epoch = agent.manifest, agent.manifest.epoch
        started = await self._start(sequence, prepared)
        if not isinstance(started, Prepared):
            return self._end_unchanged(sequence, prepared, started)
        prepared = started
        if self._request.resume is not None:
            prepared = replace(prepared, plan=without_answer(prepared.plan, before))
        if sequence.head is not None:
            self._parts.heads.note_start(sequence.head, prepared)
        self.saver = saver = Saver(self._parts.savers, agent, prepared, planned, sequence.head)
        sequence.is_blocked = saver.is_behind
        saver.begin(is_decoding=sequence.slot is not None)
        ended = await self._follow(sequence, saver)
        if isinstance(ended, Broke):
            await saver.abandon(lends=True)
            raise ended.error
        erased = claims.lender_error(agent, self.lenders)
        if erased is not None or agent.outgoing.fence > epoch:
            await saver.abandon()
            raise erased or self._fenced_turn_error()
        resume = self._show_sampled(sequence, ended) if ended.is_handover else None
        if ended.reason is None and _is_unchanged(agent, sequence, prepared):
            await saver.abandon()
            return self._end_unchanged(sequence, prepared, ended)
        self.is_saving = True
        seal = agent.outgoing.begin_sealing()
        reason = _finish_reason(sequence, ended)
        # During a move the client waits for its next token.
        with nullcontext() if seal is None else low_latency():
            durable = await saver.commit(
                ended, self._prompt.shown, seal, lambda: self._note(ended, reason)
            )
        self._timer.spend(Part.SAVE)
        self._saved.set()
        self._log_end(reason, len(ended.answer_ids))
        if agent.outgoing.fence > epoch and not ended.is_handover:
            raise self._fenced_turn_error()
        if ended.is_handover:
            return HandedOver(resume, self._timer.sent_times)
        if reason is None:
            self._check_stopping()
            return None
        tokens_count, broken = len(ended.answer_ids), sequence.answer.reader.broken_calls
        times = self._timer.sent_times
        return Finished(reason, tokens_count, ended.stop_string, durable, broken, times)

    def _log_end(self, reason: FinishReason | None, tokens_count: int) -> None:
        first = self._admitted
        assert first is not None, "a saved turn was admitted"
        text = "%s: %d of %d tokens reused (%s), %d generated; %s"
        reused, total = first.cached_tokens, first.prompt_tokens
        outcome, times = reason or "stopped", self._timer.times
        _log.info(text, outcome, reused, total, first.cache, tokens_count, times)

    def _note(self, ended: Ended, reason: FinishReason | None) -> TurnNote:
        """Return the turn's entry in the agent's history."""
        assert self._admitted is not None, "a turn that computed something was admitted"
        outcome = "moved" if ended.is_handover else "cancelled" if reason is None else reason.value
        before = self._request.resume
        tokens_count = len(ended.answer_ids) - (len(before.answer_ids) if before else 0)
        node = self._admitted.node
        return self._timer.note(node, self._admitted, outcome, tokens_count)

    async def _start(self, sequence: Sequence, prepared: Prepared) -> Prepared | Ended | Broke:
        """Wait for memory; then restore the prompt's prefix if it is on disk.

        Ends a cancelled turn here, because its restored prefix is incomplete.
        """
        parts = self._parts
        if not prepared.is_stored:  # the number of reused tokens is already known
            self._admit(prepared)
        if sequence.awaited_tokens is not None:
            granted = await self._events.get()
            if isinstance(granted, Ended | Broke):
                return granted
        if not prepared.is_stored:
            return prepared
        head = sequence.head
        try:
            if head is not None and (head.has_grown or parts.heads.ends_count != self._ends_count):
                prepared = await parts.prefixes.look_again(self._agent, prepared)
            if self._wait is not None:
                prepared = self._wait.note_fetched(prepared)
                self._end_wait()
                if prepared.fetched_tokens:
                    self._timer.spend_fetching()
            self._timer.spend(Part.QUEUE, sequence.started_s)
            prepared = await parts.prefixes.restore(
                self._agent, prepared, sequence.cache, self._unwanted
            )
        except Exception:
            sequence.cancelled.set()
            parts.engine.wake()
            await self._end()
            raise
        self._timer.spend(Part.LOAD)
        if self._unwanted.is_set():
            return await self._end()
        sequence.stops = parts.sequences.stops_of(prepared)
        sequence.awaited_tokens = None
        parts.engine.wake()
        self._admit(prepared)
        return prepared

    def _admit(self, prepared: Prepared) -> None:
        admitted = self._parts.prefixes.admitted(self._agent, prepared)
        self._admitted = replace(admitted, template=self._prompt.rendered.notes)
        self._emit(self._admitted)

    async def _end(self) -> Ended | Broke:
        """Wait for the sequence's last event."""
        while not isinstance(event := await self._events.get(), Ended | Broke):
            pass
        return event

    async def _follow(self, sequence: Sequence, saver: Saver) -> Ended | Broke:
        index = 0
        while True:
            event = await self._events.get()
            if sequence.started_s is not None:  # until then, the sequence waited for memory
                self._timer.spend(Part.QUEUE, sequence.started_s)
            if isinstance(event, Produced):
                self._timer.note_token()
                index = event.index
                self._show(index, event.shown, event)
            elif isinstance(event, Started):
                saver.note_decoding()
                for delta in _echo_deltas(sequence):
                    self._emit(delta)
                saver.publish_awaited()
            elif isinstance(event, Computed):
                saver.publish_awaited()
                self._emit(Prefilling(event.tokens_count))
            elif isinstance(event, Awaited):
                saver.publish_awaited()
            elif isinstance(event, Ended | Broke):
                self._timer.note_last()
                if isinstance(event, Ended) and not event.is_handover:
                    self._show(index, event.shown, None)
                return event

    def _show(self, index: int, shown: AnswerDelta, event: Produced | None) -> None:
        """Emit the text, logprobs and calls of the answer's token number `index`."""
        self._prompt.shown.add(shown)
        if event is not None and event.was_delivered:
            return
        logprobs = event.logprobs if event is not None else ()
        if shown.reasoning:
            self._emit(Delta(index, shown.reasoning, reasoning=True))
        begun_before, begun_now = shown.split_calls()
        for part in begun_before:
            self._emit_call(index, part)
        if shown.text or logprobs:
            self._emit(Delta(index, shown.text, logprobs=logprobs))
        for part in begun_now:
            self._emit_call(index, part)

    def _emit_call(self, index: int, part: ToolCallDelta | ToolCall) -> None:
        if isinstance(part, ToolCall):
            self._emit(ToolCalls((part,)))
        else:
            self._emit(ToolCallPart(index, part.id, part.name, part.arguments))

    def _show_sampled(self, sequence: Sequence, ended: Ended) -> Resumption | None:
        """Return how to continue on another node, and emit the token that is already sampled.

        The next node could emit it only after computing the token after it.
        """
        resume, shown = _resumption(sequence, ended), ended.sampled_shown
        if resume is None or shown is None or resume.is_delivered:
            return resume
        count = len(resume.answer_ids) + 1
        if finish_reason(sequence, count, resume.sampled, shown) is not None:
            return resume  # the answer's last token; the next node finishes the answer
        event = produced_event(sequence, count, SampledToken(resume.sampled, resume.top), shown)
        self._show(event.index, shown, event)
        return replace(resume, is_delivered=True)

    def _end_unchanged(
        self, sequence: Sequence, prepared: Prepared, ended: Ended | Broke
    ) -> HandedOver | None:
        """End a turn that computed nothing, and leave the agent unchanged."""
        agent = self._agent
        if isinstance(ended, Broke):
            raise ended.error
        if agent.outgoing.fence > agent.manifest.epoch:
            raise self._fenced_turn_error()
        is_whole = prepared.cached == agent.manifest.tokens_count == prepared.cache.tokens_count
        if prepared.tier is CacheTier.HOT and (is_whole or sequence.awaited_tokens is not None):
            agent.cache = prepared.cache
        if ended.is_handover:
            if prepared.is_stored:  # not admitted yet: admission follows a restore
                self._admit(prepared)
            return HandedOver(_resumption(sequence, ended), self._timer.sent_times)
        self._check_stopping()
        return None

    def _check_stopping(self) -> None:
        """Raise the node's error if the node, not the client, ended this turn."""
        if self._parts.health.stopping is not None:
            raise self._parts.health.stopping

    def _fenced_turn_error(self) -> StaleEpochError:
        """Count a turn whose agent has a new owner, and return its error."""
        self._parts.live.fenced_count += 1
        return self._parts.claims.lost(self._agent)


def _resumption(sequence: Sequence, ended: Ended) -> Resumption | None:
    """Return how another node continues; None if no token was sampled: it starts anew."""
    before, ids = sequence.input.resumed, tuple(ended.answer_ids)
    if before is not None and before.answer_ids == ids:
        return before  # the agent moved again before a token was sampled here
    if ended.sampled is None:
        assert not ids, "the next token of a begun answer is sampled"
        return None
    return Resumption(ids, ended.sampled.token, ended.sampled.top, sequence.input.seed)


def _finish_reason(sequence: Sequence, ended: Ended) -> FinishReason | None:
    """Return why an answer ended, for its client."""
    if ended.reason is None or ended.is_handover:
        return None
    reader = sequence.answer.reader
    is_cut = ended.reason is FinishReason.LENGTH and reader.has_cut_call
    return FinishReason.TOOL_CALLS if reader.has_calls and not is_cut else ended.reason


def _is_unchanged(agent: Agent, sequence: Sequence, prepared: Prepared) -> bool:
    """Return whether nothing was computed, so that the record needs no update."""
    before = len(sequence.input.resumed.answer_ids) if sequence.input.resumed is not None else 0
    is_new = sequence.cache.tokens_count > prepared.cached or len(sequence.answer_ids) > before
    # If the cache was never saved, only the reused tokens are left.
    return not is_new and (agent.is_durable or prepared.cached == agent.manifest.tokens_count)


def _echo_deltas(sequence: Sequence) -> Iterator[Delta]:
    """Yield the prompt's text and the requested log probabilities, once it is in the cache."""
    echo = sequence.echo
    if echo is None:
        return
    sequence.echo = None  # once
    yield Delta(-1, echo.text)
    if echo.scored is None:
        return
    first = sequence.input.token_text(sequence.input.prompt[0])
    logprobs = [TokenLogprob(first, None), *echo.scored]
    for start in range(0, len(logprobs), SCORED_CHUNK_TOKENS):
        yield Delta(-1, "", logprobs=tuple(logprobs[start : start + SCORED_CHUNK_TOKENS]))
