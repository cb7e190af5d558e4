"""Open turns: the set of those that run, each one's stream of events, its span and its breaker.

If the agent is moved, the turn continues on the new node; readers of the events see one stream.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from fabric.control.calls import ErrorReply
from fabric.errors import FabricError, RetryLaterError
from fabric.hosting.tracing import Span, begin_span
from fabric.ports import Clock
from fabric.turn.generation import (
    Admitted,
    Delta,
    Event,
    Failed,
    Finished,
    HandedOver,
    Prefilling,
    ToolCallPart,
    ToolCalls,
    TurnTimes,
)
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLostError, remote_error
from router.limits import STOPPING_RETRY_S
from router.telemetry import Telemetry
from router.turn_request import TurnRequest

_LOG = logging.getLogger("macfabric.router.turns")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Progress:
    """Tokens of a prompt that are computed or cached, and the total."""

    done: int
    total: int

    def __str__(self) -> str:
        return f"prefill {self.done}/{self.total}"


AnswerEvent = Delta | ToolCalls | Finished


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """End of a turn: ok, failed or cancelled; its times are known if its node has sent them."""

    outcome: str
    completion_tokens: int
    seconds: float
    times: TurnTimes | None = None
    answered_tokens: int = 0  # that were sent to the client, also of a turn that broke off

    def __str__(self) -> str:
        """Describe it for a log."""
        spent = f": {self.times}" if self.times else ""
        return f"{self.outcome}, {self.completion_tokens} tokens in {self.seconds:.3f} s{spent}"

    def end_span(self, span: Span) -> None:
        """End the turn's span; a part that its node has not sent is not known."""
        first_s = self.times.first_token_s if self.times is not None else None
        span.note(
            outcome=self.outcome, completion_tokens=self.completion_tokens, first_token_s=first_s
        )
        span.end(None if self.outcome == "ok" else self.outcome)


def stopping() -> RetryLaterError:
    """Return the error of a turn that a stopping router refuses or cancels."""
    message = "the router is stopping; send the request again"
    return RetryLaterError(message, retry_after_s=STOPPING_RETRY_S, code="stopping")


class Breaker:
    """Switch that cancels one turn, wherever it waits for its node."""

    def __init__(self) -> None:
        self.is_open = False
        self._waiting: asyncio.Task[object] | None = None

    def open(self) -> None:
        """Cancel the turn: the current wait, or the next one, raises `stopping()`."""
        if not self.is_open:
            self.is_open = True
            if self._waiting is not None:
                self._waiting.cancel()

    async def wait(self, work: Awaitable[T]) -> T:
        """Await `work`; raise `stopping()` if the turn is cancelled meanwhile."""
        task = self._waiting = asyncio.current_task()
        assert task is not None, "a turn runs in a task"
        try:
            if self.is_open:  # cancels `work`, which must be awaited in any case
                task.cancel()
            return await work
        except asyncio.CancelledError:
            if self.is_open and task.uncancel() == 0:
                raise stopping() from None
            raise
        finally:
            self._waiting = None


class RunningTurns:
    """All turns of a router, from their request to their last event."""

    def __init__(self) -> None:
        self._breakers: set[Breaker] = set()
        self.is_refusing = False

    def __len__(self) -> int:
        return len(self._breakers)

    def begin(self) -> Breaker:
        """Add a turn; raise `stopping()` if the router is stopping."""
        if self.is_refusing:
            raise stopping()
        breaker = Breaker()
        self._breakers.add(breaker)
        return breaker

    def discard(self, breaker: Breaker) -> None:
        """Remove a turn that has ended."""
        self._breakers.discard(breaker)

    def refuse(self) -> None:
        """Refuse turns from now on."""
        self.is_refusing = True

    def break_off(self) -> None:
        """Cancel all turns; their nodes keep what they have computed."""
        for breaker in list(self._breakers):
            breaker.open()


class OpenTurn:
    """Admitted turn. Read `events` to the end, or `close` to cancel the turn on its node."""

    def __init__(  # noqa: PLR0913 - all by name, from one place
        self,
        admitted: Admitted,
        source: AsyncGenerator[Event, None],
        *,
        started_s: float,
        clock: Clock,
        telemetry: Telemetry,
        on_prefilled: Callable[[int], None],
        on_decoding: Callable[[], None],
        on_end: Callable[[EndedTurn], None],
        follow: Callable[[HandedOver], Awaitable[AsyncGenerator[Event, None]]],
        is_current: Callable[[], bool],
        alias: str,
        on_unsaved: Callable[[], Awaitable[None]],
        breaker: Breaker,
    ) -> None:
        self.admitted = admitted
        self._source = source
        self._started_s = started_s
        self._clock = clock
        self._telemetry = telemetry
        self._on_prefilled = on_prefilled  # how many of its tokens, of the prompt's
        self._on_decoding = on_decoding
        self._on_end = on_end
        self._follow = follow
        self._is_current = is_current
        self._on_unsaved = on_unsaved
        self._alias = alias  # what logs call the agent
        self._is_closed = False
        self._times: TurnTimes | None = None  # of the nodes that it has left, and then of its last
        self._breaker = breaker
        self._answered_tokens = 0
        self.prefilled_tokens: int | None = None  # of the prompt, while more of them are to come
        telemetry.note_admission(admitted)

    async def events(self) -> AsyncGenerator[AnswerEvent, None]:
        """Yield the answer's events with whole calls; raise FabricError if the node breaks off."""
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                if not isinstance(part, ToolCallPart):
                    yield part

    async def parts(self) -> AsyncGenerator[AnswerEvent | ToolCallPart, None]:
        """Yield the answer's events, with the parts of calls as they are generated."""
        is_first = True
        try:
            async for event in self._all_events():
                if isinstance(event, Prefilling):
                    self.prefilled_tokens = event.tokens
                    self._on_prefilled(event.tokens)
                    continue
                self.prefilled_tokens = None
                if is_first:
                    is_first = False
                    self._first_token()
                if isinstance(event, Delta) and not event.is_echo:
                    self._answered_tokens = event.index + 1
                answered = _answer_event(event)
                if isinstance(answered, Finished):
                    self._add_times(answered.times)
                    self._check_current()
                    if not answered.durable:
                        await self._on_unsaved()
                    await self._end("ok", answered.completion_tokens)
                yield answered
        except NodeLostError as error:
            await self._end("failed")
            message = (
                f"node {self.admitted.node} was lost during its answer; send the request again"
            )
            _LOG.warning("agent %s: %s", self._alias, error.code)
            raise RetryLaterError(message, code=NodeLostError.code) from None
        except FabricError:
            await self._end("failed")
            raise
        finally:
            await self.close()

    async def _all_events(self) -> AsyncGenerator[Event, None]:
        """Yield the events of every node that the turn runs on, in order."""
        while True:
            try:
                event = await self._breaker.wait(anext(self._source))
            except StopAsyncIteration:
                return
            if not isinstance(event, HandedOver):
                yield event
                continue
            self._add_times(event.times)
            await self._source.aclose()
            self._source = await self._breaker.wait(self._follow(event))

    def _add_times(self, times: TurnTimes | None) -> None:
        if times is not None:
            self._times = times if self._times is None else self._times.plus(times)

    @property
    def progress(self) -> Progress | None:
        """How much of the prompt is computed, while it is."""
        tokens = self.prefilled_tokens
        return None if tokens is None else Progress(tokens, self.admitted.prompt_tokens)

    async def close(self) -> None:
        """Close the turn; if it has not ended, its node stops generating."""
        await self._end("cancelled")

    async def _end(self, outcome: str, completion_tokens: int = 0) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        seconds = self._clock.monotonic_s() - self._started_s
        self._telemetry.note_end(outcome, completion_tokens)
        self._telemetry.note_times(seconds, self._times, completion_tokens)
        tokens = completion_tokens or self._answered_tokens
        self._on_end(EndedTurn(outcome, completion_tokens, seconds, self._times, tokens))
        await self._source.aclose()

    def _check_current(self) -> None:
        """Raise instead of acknowledging a turn of a node that has lost the agent meanwhile."""
        if not self._is_current():
            self._telemetry.fenced.inc()
            message = "another node took the agent over in mid-answer; send the request again"
            raise RetryLaterError(message, code="fenced")

    def _first_token(self) -> None:
        self._telemetry.note_first_token(self.admitted, self._clock.monotonic_s() - self._started_s)
        self._on_prefilled(self.admitted.prompt_tokens)
        self._on_decoding()


def _answer_event(event: Event) -> AnswerEvent | ToolCallPart:
    assert not isinstance(event, HandedOver | Prefilling), "taken before"
    if isinstance(event, Failed):
        raise remote_error(ErrorReply(event.status, event.code, event.message))
    if isinstance(event, Admitted):
        message = f"{event.node} admitted the same turn twice"
        raise FabricError(message, code="bad_event")
    return event


def begin_turn_span(fleet: Fleet, turn: TurnRequest) -> Span:
    """Begin a turn's span, as a part of its client's if that was sent."""
    return begin_span(
        "turn",
        turn=turn.id,
        tenant=fleet.tenant_alias(turn.tenant),
        model=turn.model,
        priority=turn.priority.value,
    )


def note_admission_in(span: Span, first: Admitted, alias: str) -> None:
    """Note where a turn runs and what of its prompt was reused; `alias` names its agent."""
    span.note(
        agent=alias,
        node=first.node,
        epoch=first.epoch,
        cache=first.cache.value,
        match=first.match.value,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        fetched_tokens=first.fetched_tokens,
    )
