"""One turn of one agent: claim, match, restore, prefill, decode, save.

Runs as its own task, so that a client that hangs up ends the decoding but never leaves an
agent half-saved. Events go to a bounded queue; a client that does not read is dropped.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.cache_spec import CacheGroup
from fabric.control import LastMatch
from fabric.errors import FabricError, RejectedError
from fabric.generation import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    IdentityKind,
    MatchKind,
    ToolCalls,
)
from fabric.limits import STREAM_EVENTS_MAX
from fabric.state_points import state_points
from node.agent import Agent
from node.claim import claimed
from node.mlx.answer import Answer, Shown
from node.prefix import Prepared, prepare
from node.prompt_plan import EMPTY_TRANSCRIPT, PromptPlan, plan_prompt
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

    def _emit(self, event: Event | FabricError) -> None:
        if self._queue.qsize() >= STREAM_EVENTS_MAX:
            self.cancel()
        else:
            self._queue.put_nowait(event)

    async def _run(self) -> None:
        try:
            text = await self._node.in_worker(self._render)
            async with claimed(self._node, self._request, text) as agent:
                finished = await self._serve(agent, text)
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

    async def _serve(self, agent: Agent, text: str) -> Finished | None:
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
        self._emit(
            Admitted(
                agent=agent.manifest.agent,
                node=self._node.name,
                epoch=agent.manifest.epoch,
                cache=prepared.tier,
                match=match,
                prompt_tokens=len(plan.ids),
                cached_tokens=cached,
                match_reason=reason,
            )
        )
        return await self._decode(agent, text, prepared)

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

    async def _decode(self, agent: Agent, text: str, prepared: Prepared) -> Finished | None:
        produced: asyncio.Queue[SequenceEvent] = asyncio.Queue()
        sequence = self._make_sequence(text, prepared, produced)
        self._sequence = sequence
        if self._cancelled:
            sequence.cancelled.set()
        saver = Saver(self._node, agent, prepared, self._request)
        sequence.is_blocked = saver.is_behind
        self._node.engine.submit(sequence)
        saver.begin()
        ended = await self._follow(produced, saver)
        if isinstance(ended, Broke):
            await saver.abandon()
            raise ended.error
        durable = await saver.commit(ended)
        if ended.reason is None:  # cancelled: nobody listens
            return None
        reason = FinishReason.TOOL_CALLS if sequence.answer.has_calls else ended.reason
        return Finished(reason, len(ended.answer_ids), ended.stop_string, durable)

    def _make_sequence(
        self, text: str, prepared: Prepared, produced: "asyncio.Queue[SequenceEvent]"
    ) -> Sequence:
        node, asked, ids = self._node, self._request.sampling, prepared.plan.ids
        loop = asyncio.get_running_loop()
        room = node.context_tokens_max - len(ids)

        cache = prepared.cache
        stops: tuple[int, ...] = ()
        if node.reuses and CacheGroup.STATE in node.spec.groups:
            stops = state_points(ids, node.tokenizer.cut_texts.keys(), prepared.cached)

        def emit(event: SequenceEvent) -> None:
            loop.call_soon_threadsafe(produced.put_nowait, event)

        def reached(tokens_count: int) -> None:
            if tokens_count in stops:
                cache.take_snapshot()

        return Sequence(
            cache=cache,
            prompt=ids,
            sampling=replace(asked, max_tokens=max(1, min(asked.max_tokens, room))),
            seed=asked.seed if asked.seed is not None else secrets.randbits(63),
            answer=Answer(node.tokenizer, text, asked.stop, self._request.tools),
            emit=emit,
            stop_ids=node.tokenizer.eos_ids,
            token_text=node.tokenizer.token_text,
            priority=self._request.priority,
            stops=stops,
            reached=reached,
        )

    async def _follow(
        self, produced: "asyncio.Queue[SequenceEvent]", saver: Saver
    ) -> Ended | Broke:
        index = 0
        while True:
            event = await produced.get()
            if isinstance(event, Started):
                saver.note_decoding()
            elif isinstance(event, Produced):
                index = event.index
                self._show(index, event.shown, event)
            else:
                if isinstance(event, Ended):
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
