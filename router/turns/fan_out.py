"""Several answers to one request: every answer is a separate turn with a number.

    prompt 0 ──▶ computed and stored once ──▶ answers 0 … n-1, in parallel
    prompt 1 ──▶ likewise, in parallel    ──▶ answers n … 2n-1

The first answer to a prompt belongs to its agent. The others run on the node that computed the
prompt, start from its stored cache, and are not kept. If one fails, all end.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from fabric.errors import OverloadedError
from fabric.turn.generation import Admitted, Sampling, ToolCallPart
from router.fresh_ids import fresh_operation
from router.limits import ANSWER_PARTS_WAITING_MAX, ANSWER_PLACE_S, ANSWERS_AT_ONCE_MAX
from router.turn_request import TurnRequest
from router.turns.answer import AnswerParts, WholeAnswer
from router.turns.open_turn import AnswerEvent, OpenTurn, Progress
from router.turns.owner_wait import AwaitedNodes
from router.turns.turns import RETRY_S, Turns

Part = AnswerEvent | ToolCallPart


class FanOut:
    """Turns of one request. Read `parts` to the end, or `close` to cancel them."""

    def __init__(self, turns: Turns, requests: Sequence[TurnRequest], count: int) -> None:
        """Prepare to answer each of the turns `count` times."""
        self._turns = turns
        self._requests = requests
        self._count = count
        self._admissions: dict[int, Admitted] = {}  # by the number of the prompt
        self._first: OpenTurn | None = None
        self._running: list[OpenTurn] = []
        self._slots = asyncio.Semaphore(ANSWERS_AT_ONCE_MAX)
        self._queue: asyncio.Queue[tuple[int, Part] | BaseException | None] = asyncio.Queue(
            ANSWER_PARTS_WAITING_MAX
        )
        self._task: asyncio.Task[None] | None = None

    async def open(self, waiting: AwaitedNodes | None = None) -> Admitted:
        """Wait until a node has admitted the first prompt."""
        self._first = await self._turns.open(self._first_turn(0), waiting)
        self._admissions[0] = self._first.admitted
        return self._first.admitted

    @property
    def admitted(self) -> list[Admitted]:
        """Admissions of the prompts; complete once the last part was read."""
        return [self._admissions[at] for at in sorted(self._admissions)]

    @property
    def progress(self) -> Progress | None:
        """Progress of a prompt's prefill, until its first token."""
        return next((turn.progress for turn in self._running if turn.progress), None)

    async def parts(self) -> AsyncGenerator[tuple[int, Part], None]:
        """Yield the parts of all answers with their numbers; raise the first error."""
        self._task = asyncio.create_task(self._run())
        try:
            while (item := await self._queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            await self.close()

    async def gather(self) -> list[WholeAnswer]:
        """Read all answers to their ends."""
        answers = [AnswerParts() for _ in range(len(self._requests) * self._count)]
        async with aclosing(self.parts()) as parts:
            async for number, part in parts:
                answers[number].add(part)
        return [answer.whole() for answer in answers]

    async def close(self) -> None:
        """Cancel all turns that have not ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._first is not None:
            await self._first.close()

    async def _run(self) -> None:
        """Answer all prompts; the last item of the queue is the error, or None."""
        try:
            async with asyncio.TaskGroup() as group:
                for at in range(len(self._requests)):
                    group.create_task(self._answer_prompt(at, group))
        except BaseExceptionGroup as failed:
            await self._queue.put(_first_error(failed))
        else:
            await self._queue.put(None)

    async def _answer_prompt(self, at: int, group: asyncio.TaskGroup) -> None:
        first, begun = at * self._count, self._first_turn(at)
        if self._count == 1:
            await self._answer(begun, first, at)
            return
        turn = replace(self._requests[at], prefetch=())
        node, agent = None, None
        if not turn.prompt.echo:
            await self._answer(begun, None, at)
            admitted = self._admissions[at]
            node, agent = admitted.node, admitted.agent
        for index in range(self._count):
            answer = replace(
                turn,
                operation=fresh_operation(),
                sampling=_with_seed(turn.sampling, index),
                near=node,
                beside=agent if index else None,
            )
            group.create_task(self._answer(answer, first + index, at))

    async def _answer(self, turn: TurnRequest, number: int | None, at: int) -> None:
        """Run one turn; without a number, its parts are dropped."""
        async with self._slots:
            opened = await self._open_turn(turn, at)
            self._running.append(opened)
            try:
                async with aclosing(opened.parts()) as parts:
                    async for part in parts:
                        if number is not None:
                            await self._queue.put((number, part))
            finally:
                self._running.remove(opened)
                await opened.close()

    async def _open_turn(self, turn: TurnRequest, at: int) -> OpenTurn:
        """Open a turn; wait while nodes are full, as part of the request was admitted."""
        if at == 0 and self._first is not None:
            opened, self._first = self._first, None
            return opened
        loop = asyncio.get_running_loop()
        refused_s: float | None = None
        while True:
            try:
                opened = await self._turns.open(turn)
            except OverloadedError:
                if self._running or refused_s is None:
                    refused_s = loop.time()
                if loop.time() - refused_s >= ANSWER_PLACE_S:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                self._admissions.setdefault(at, opened.admitted)
                return opened

    def _first_turn(self, at: int) -> TurnRequest:
        """Return the first turn of a prompt: its only answer, or the turn that computes it."""
        turn = self._requests[at]
        if self._count == 1 or turn.prompt.echo:
            return turn
        # Otherwise unchanged, so that an invalid request is refused before the response starts.
        return replace(turn, sampling=replace(turn.sampling, max_tokens=1))


def _with_seed(sampling: Sampling, index: int) -> Sampling:
    """Give every answer a different seed, the same at every repetition."""
    return sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + index)


def _first_error(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
