"""One turn of one agent: prepare the prompt, claim the agent, decode, and stream events.

Each turn runs in its own task, so that a client that disconnects ends the decoding but never leaves
an agent half saved. Events go to a bounded queue; a client that does not read is dropped.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fabric.control.node_calls import SealAgent
from fabric.errors import FabricError, HungUpError, RejectedError
from fabric.hosting.tracing import span
from fabric.hosting.turn_context import about_trace, begin_turn
from fabric.ids import MigrationId, TenantId
from fabric.record.lenders import Lender
from fabric.record.manifest import Manifest
from fabric.turn.generation import Event, Failed, Finished, GenerateRequest, HandedOver
from node.agents.agent import PausedAnswer
from node.agents.outgoing import OutgoingMove
from node.engine.sequence import Sequence
from node.limits import STREAM_EVENTS_MAX
from node.turn.decoding import Decoding, TurnParts
from node.turn.turn_timer import Part, TurnTimer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnServer(TurnParts):
    """Server of turns: one `Turn` for each request to the node."""

    def serve(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Serve one turn; closing the iterator cancels it."""
        return Turn(self, request).events()


class Turn:
    """One request being served."""

    def __init__(self, parts: TurnParts, request: GenerateRequest) -> None:
        self._parts = parts
        self._request = request
        self._timer = TurnTimer(parts.savers.clock, request)
        self._queue: asyncio.Queue[Event | FabricError | None] = asyncio.Queue()
        self._unwanted = threading.Event()  # the client has disconnected
        self._is_waiting = False  # waits for its prompt's tokens or its agent
        self._is_dropping = False  # drops events, as the client reads too slowly
        self._outgoing: OutgoingMove | None = None  # its agent's move, while it holds the agent
        self._decoding: Decoding | None = None  # set while it holds the agent
        self.saved = asyncio.Event()  # set once its record is published, or it ended without one
        self.task = asyncio.create_task(self._run())
        parts.live.add(self)

    @property
    def tenant(self) -> TenantId:
        return self._request.tenant

    @property
    def is_preparing(self) -> bool:
        """Whether its prompt is still being encoded, or its agent is in use."""
        return self._decoding is None or self._decoding.sequence is None

    @property
    def lenders(self) -> tuple[Lender, ...]:
        """Agents whose rows its cache borrowed."""
        return self._decoding.lenders if self._decoding is not None else ()

    @property
    def _sequence(self) -> Sequence | None:
        return self._decoding.sequence if self._decoding is not None else None

    async def events(self) -> AsyncIterator[Event]:
        """Yield events; raise FabricError if the turn fails before its first one."""
        is_first = True
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, FabricError):
                    if is_first:
                        raise item
                    item = Failed(int(item.status), item.code, item.message)
                is_first = False
                yield item
        finally:
            item = None  # an error's traceback holds this frame and the turn's
            self.cancel()

    def cancel(self) -> None:
        """Stop waiting, encoding or decoding; save the computed tokens."""
        self._unwanted.set()
        if self._is_waiting:
            self.task.cancel()
        elif self._sequence is not None:
            self._sequence.cancelled.set()
            self._parts.engine.wake()

    async def save_now(self) -> Manifest | None:
        """Save the turn's tokens so far; return their unpublished record."""
        decoding, sequence = self._decoding, self._sequence
        if decoding is None or decoding.saver is None or sequence is None:
            return None
        return await decoding.saver.save_now(list(sequence.answer_ids))

    def hand_over(self, seal: SealAgent) -> None:
        """Ask the turn to stop, save and seal its agent; another node continues the answer."""
        assert self._outgoing is not None, "the turn holds the agent to be sealed"
        self._outgoing.ask(seal)
        if self._sequence is not None:
            self._parts.engine.moving.begin_pause(seal.migration)
            self._sequence.yielding.set()
            self._parts.engine.wake()

    async def keep(self, migration: MigrationId) -> None:
        """Continue after a failed move, or wait for a save that has begun to write the seal."""
        if self._outgoing is None or not self._outgoing.is_asked(migration):
            return
        if self._is_saving:
            await asyncio.wait([self.task])
        else:
            self._outgoing.stop_asking()

    @property
    def _is_saving(self) -> bool:
        return self._decoding is not None and self._decoding.is_saving

    def _emit(self, event: Event) -> None:
        is_last = isinstance(event, Finished | HandedOver)
        if self._queue.qsize() >= STREAM_EVENTS_MAX and not is_last:
            self._is_dropping = True
            self.cancel()
        if not self._is_dropping:  # after a dropped event, only the end is sent
            self._queue.put_nowait(event)

    def _fail(self, error: FabricError) -> None:
        stopping = self._parts.health.stopping if isinstance(error, HungUpError) else None
        # If unread, the frames of its traceback would keep the cache and this queue alive.
        self._queue.put_nowait((stopping or error).with_traceback(None))

    async def _run(self) -> None:
        begin_turn(self._timer.id)
        with (
            about_trace(self._timer.tag.trace),
            span("serve", node=self._parts.health.name) as serve_span,
        ):
            try:
                await self._serve()
            finally:
                self._timer.add_parts(serve_span)

    async def _serve(self) -> None:
        try:
            last = await self._claim_and_serve()
            if self._is_dropping:
                message = (
                    f"the client reads too slowly: it is over {STREAM_EVENTS_MAX} events behind"
                )
                raise RejectedError(message, code="slow_reader")  # noqa: TRY301 - as any other end
            if last is not None:
                self._emit(last)
        except FabricError as error:
            self._fail(error)
        except asyncio.CancelledError:  # cancelled while it waited
            if not self._unwanted.is_set():
                raise
            self._fail(HungUpError())
        except Exception:  # noqa: BLE001 - nothing may end the loop
            _log.exception("a turn failed")
            self._fail(FabricError("the node failed on this request"))
        finally:
            self._parts.live.discard(self)
            if self._outgoing is not None:
                self._parts.engine.moving.end_pause(self._outgoing.stop_asking())
            self.saved.set()
            self._queue.put_nowait(None)

    async def _claim_and_serve(self) -> Finished | HandedOver | None:
        """Return the last event once the agent is idle, so that its next turn finds it idle."""
        parts, request, timer = self._parts, self._request, self._timer
        if parts.health.stopping is not None or self._unwanted.is_set():
            raise HungUpError
        self._is_waiting = True
        await parts.claims.admit(request)
        parts.prompts.encoder.check_sampling(request.sampling)
        if not request.was_admitted:
            parts.engine.check_waiting(request.tenant, request.priority)
        timer.spend(Part.QUEUE)
        prompt = await parts.prompts.run(request, parts.claims, self._unwanted.is_set)
        timer.spend(Part.PREPARE)
        async with parts.claims.hold(
            prompt.directed.request, prompt.rendered.text, prompt.restored.located.forms
        ) as agent:
            self._is_waiting = False
            timer.spend(Part.QUEUE)
            agent.turn, self._outgoing = self, agent.outgoing
            try:
                prompt = await parts.prompts.refresh(prompt, parts.claims)
                self._decoding = Decoding(
                    parts, request, prompt, agent, self._emit, self._unwanted, self.saved, timer
                )
                last = await self._decoding.run()
            finally:
                agent.turn = self._decoding = None
            if isinstance(last, HandedOver) and last.resume is not None:
                agent.paused_answer = PausedAnswer(agent.manifest.epoch)
            return last
