"""One turn of one agent: claim, match, restore, prefill, decode, save.

Runs as its own task, so that a client that hangs up ends the decoding but never leaves an
agent half-saved. Events go to a bounded queue; a client that does not read is dropped.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.cache_spec import CacheGroup
from fabric.control import LastMatch, SealAgent
from fabric.errors import FabricError, RejectedError, StaleEpochError
from fabric.generation import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    HandedOver,
    IdentityKind,
    MatchKind,
    Resumption,
    ToolCalls,
)
from fabric.ids import MigrationId
from fabric.limits import STREAM_EVENTS_MAX
from fabric.manifest import Manifest
from fabric.state_points import state_points
from node.agent import Agent
from node.claim import claimed
from node.delivery import finish_reason, produced
from node.mlx.answer import Answer, Shown
from node.mlx.engine import Drawn
from node.prefix import Prepared, prepare
from node.prompt_plan import EMPTY_TRANSCRIPT, PromptPlan, plan_prompt
from node.resumption import plan_resumption, resumption, without_answer
from node.saver import Saver
from node.sequence import Broke, Ended, Produced, Sequence, SequenceEvent, Started

if TYPE_CHECKING:
    from node.node import Node

_log = logging.getLogger(__name__)


class Turn:
    """One request being served."""

    def __init__(self, node: "Node", request: GenerateRequest) -> None:
        self._node = node
        self._request = request
        self._queue: asyncio.Queue[Event | FabricError | None] = asyncio.Queue()
        self._sequence: Sequence | None = None
        self._cancelled = False
        self._seal: SealAgent | None = None  # the move that waits for its end
        self._is_saving = False
        self.saved = asyncio.Event()  # its record is published, or nothing more comes of it
        self._saver: Saver | None = None
        node.turns.add(self)
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
            self.cancel()

    def cancel(self) -> None:
        """Stop decoding at the next step; what was computed is saved."""
        self._cancelled = True
        if self._sequence is not None:
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

    def _emit(self, event: Event | FabricError) -> None:
        if self._queue.qsize() >= STREAM_EVENTS_MAX:
            self.cancel()
        else:
            self._queue.put_nowait(event)

    async def _run(self) -> None:
        try:
            text = await self._node.in_worker(self._render)
            async with claimed(self._node, self._request, text) as agent:
                agent.turn = self
                try:
                    finished = await self._serve(agent, text)
                finally:
                    agent.turn = None
            # Only now, so that the next turn finds the agent idle.
            if finished is not None:
                self._emit(finished)
        except FabricError as error:
            self._emit(error)
        except Exception:  # noqa: BLE001 - nothing may end the loop
            _log.exception("a turn failed")
            message = "the node failed on this request"
            self._emit(FabricError(message))
        finally:
            self._node.turns.discard(self)
            self.saved.set()
            self._queue.put_nowait(None)

    def _render(self) -> str:
        request = self._request
        if (request.messages is None) == (request.prompt is None):
            message = "send either messages or a prompt"
            raise RejectedError(message)
        if request.prompt is not None:
            text = request.prompt
        else:
            text = self._node.tokenizer.render(
                request.messages or [], request.tools, request.template_options
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            message = "the prompt contains half of a surrogate pair, which is not text"
            raise RejectedError(message, code="invalid_text", param="messages") from None
        return text

    async def _serve(self, agent: Agent, text: str) -> Finished | HandedOver | None:
        resume = self._request.resume
        if resume is not None:
            plan = plan_resumption(agent.manifest, resume)
        else:
            plan = await self._node.in_worker(lambda: self._plan(agent, text))
        self._check_length(plan)
        prepared = await prepare(self._node, agent, plan, self._request.sampling.max_tokens)
        cached = prepared.cached
        reason = plan.reason
        if self._node.problem is not None:
            reason = f"served without reuse: {self._node.problem}"
        match = plan.match if cached else MatchKind.NONE
        if cached and match is MatchKind.NONE:
            match = MatchKind.DIVERGE  # it begins like another conversation
        agent.last_match = LastMatch(match, cached, len(plan.ids), reason)
        agent.came_from_peer = False
        admitted = Admitted(
            agent=agent.manifest.agent,
            node=self._node.name,
            epoch=agent.manifest.epoch,
            cache=prepared.tier,
            match=match,
            prompt_tokens=len(plan.ids),
            cached_tokens=cached,
            match_reason=reason,
        )
        return await self._decode(agent, text, prepared, admitted)

    def _plan(self, agent: Agent, text: str) -> PromptPlan:
        stored = agent.transcript()
        raw = self._request.prompt is not None
        plan = plan_prompt(self._node.tokenizer, text, stored, raw=raw)
        share = self._node.settings.diverge_ratio_min
        if (
            self._request.identity.kind is IdentityKind.AGENT
            and plan.match is MatchKind.DIVERGE
            and plan.kept_tokens < share * len(stored.ids)
        ):
            reason = f"{plan.reason}: under {share:.0%} in common, the agent starts afresh"
            fresh = plan_prompt(self._node.tokenizer, text, EMPTY_TRANSCRIPT, raw=raw)
            plan = replace(fresh, reason=reason)
        return plan

    def _check_length(self, plan: PromptPlan) -> None:
        count, limit = len(plan.ids), self._node.context_tokens_max
        if count == 0:
            message = "the prompt has no tokens"
            raise RejectedError(message, code="empty_prompt", param="messages")
        if count >= limit:
            message = (
                f"the prompt has {count} tokens and the context holds {limit}: "
                "shorten the conversation"
            )
            raise RejectedError(message, code="context_length_exceeded", param="messages")
        self._node.engine.budget.check(self._node.spec.resident_bytes(count))

    async def _decode(
        self, agent: Agent, text: str, prepared: Prepared, admitted: Admitted
    ) -> Finished | HandedOver | None:
        events: asyncio.Queue[SequenceEvent] = asyncio.Queue()
        sequence = self._make_sequence(text, prepared, events)
        self._sequence = sequence
        if self._cancelled:
            sequence.cancelled.set()
        if self._seal is not None:
            sequence.yielding.set()
        if self._request.resume is not None:
            prepared = replace(prepared, plan=without_answer(prepared.plan, agent.manifest))
        self._saver = saver = Saver(self._node, agent, prepared, self._request)
        sequence.is_blocked = saver.is_behind
        try:
            self._node.engine.submit(sequence)
        except FabricError:
            if prepared.cache.tokens_count == agent.manifest.tokens_count:
                agent.cache = prepared.cache  # it is as it was
            raise
        self._emit(admitted)
        saver.begin()
        try:
            ended = await self._follow(events, saver)
            if isinstance(ended, Broke):
                await saver.abandon()
                raise ended.error
            if agent.fence > admitted.epoch:
                await saver.abandon()
                raise self._fenced(agent)
            resume = self._show_drawn(sequence, ended, text) if ended.is_handover else None
            self._is_saving = True
            durable = await saver.commit(ended, self._seal)
            self.saved.set()
            if agent.fence > admitted.epoch and not ended.is_handover:
                raise self._fenced(agent)
        finally:
            if sequence.reservation is not None:
                sequence.reservation.release()
            self._node.note_hot()
            self._node.engine.wake()
        if ended.is_handover:
            return HandedOver(resume)
        if ended.reason is None:  # cancelled: nobody listens
            return None
        reason = FinishReason.TOOL_CALLS if sequence.answer.has_calls else ended.reason
        return Finished(reason, len(ended.answer_ids), ended.stop_string, durable)

    def _fenced(self, agent: Agent) -> StaleEpochError:
        """Count and describe a turn that ended when its agent was another node's."""
        self._node.fenced_turns += 1
        message = f"another node took the agent over at epoch {agent.fence}"
        return StaleEpochError(message, code="fenced")

    def _make_sequence(
        self, text: str, prepared: Prepared, events: "asyncio.Queue[SequenceEvent]"
    ) -> Sequence:
        node, asked, ids = self._node, self._request.sampling, prepared.plan.ids
        loop = asyncio.get_running_loop()
        resume = self._request.resume
        before = list(resume.answer_ids) if resume is not None else []
        room = node.context_tokens_max - len(ids) + len(before)
        seed = resume.seed if resume is not None else asked.seed
        answer = self._answer_with(text, before)
        cache = prepared.cache
        stops: tuple[int, ...] = ()
        if node.reuses and CacheGroup.STATE in node.spec.groups:
            special_ids, on_grid = node.tokenizer.cut_texts.keys(), node.settings.exact_chunks
            stops = state_points(ids, special_ids, prepared.cached, on_grid=on_grid)

        def emit(event: SequenceEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        def reached(tokens_count: int) -> None:
            if tokens_count in stops:
                cache.take_snapshot()

        return Sequence(
            cache=cache,
            prompt=ids,
            sampling=replace(asked, max_tokens=max(1, min(asked.max_tokens, room))),
            seed=seed if seed is not None else secrets.randbits(63),
            answer=answer,
            emit=emit,
            stop_ids=node.tokenizer.eos_ids,
            token_text=node.tokenizer.token_text,
            priority=self._request.priority,
            reserve_bytes=node.spec.resident_bytes(prepared.room_tokens),
            granted=lambda: cache.reserve(prepared.room_tokens),
            owns_reservation=True,
            resumed=resume,
            answer_ids=before,
            stops=stops,
            reached=reached,
        )

    def _answer_with(self, text: str, ids: SequenceOf[int]) -> Answer:
        answer = Answer(
            self._node.tokenizer, text, self._request.sampling.stop, self._request.tools
        )
        for token in ids:
            answer.push(token)
        return answer

    def _show_drawn(self, sequence: Sequence, ended: Ended, text: str) -> Resumption | None:
        """Say how to go on elsewhere, and show the token that is drawn already.

        The next node has to compute the one behind it before it would come to show this one.
        """
        resume = resumption(sequence, ended)
        if resume is None or resume.told:
            return resume
        shown = self._answer_with(text, resume.answer_ids).push(resume.drawn)
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
            else:
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
