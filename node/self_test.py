"""Self-test at start-up of saving and restoring an agent: save, drop, restore, compare.

Runs the real path with the real model under a tenant of its own and erases what it made.
Several caches of this kind were shipped without ever having been read back.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass

from fabric.control.node_calls import SelfTest
from fabric.errors import FabricError, RejectedError, RetryElsewhereError, RetryLaterError
from fabric.ids import SELF_TEST_TENANT, AgentId, OperationId
from fabric.limits import BLOCK_TOKENS
from fabric.ports import Clock
from fabric.turn.generation import (
    Admitted,
    CacheTier,
    Delta,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Identity,
    IdentityKind,
    Sampling,
)
from node.background_loop import BackOff
from node.limits import FLUSH_IDLE_S, SELF_TEST_RETRY_S_MAX
from node.mlx.chat_tokenizer import ChatTokenizer
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.runtime.live_turns import LiveTurns
from node.runtime.workers import Workers
from node.store.posix_disk import DiskError
from node.tiers.agent_records import AgentRecords
from node.tiers.hot_tier import SAVING
from node.turn.turn import TurnServer

_log = logging.getLogger(__name__)
SELF_TEST = "self-test"  # the cause of trouble
_TURNS = 2

AGENT = AgentId("selftest")
KEY = SELF_TEST_TENANT, AGENT
_ANSWER_TOKENS = 8
_WORDS = "one two three four five six seven eight nine ten eleven twelve"


UNTESTED = SelfTest(passed=False, detail="not run yet", seconds=0.0)


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions to the self-test's agent."""

    identity: NodeIdentity
    tokenizer: ChatTokenizer
    workers: Workers
    turns: TurnServer

    async def render_once(self) -> None:
        """Compile the chat template, so that no first turn waits for it."""
        words = [{"role": "user", "content": _WORDS}]
        with suppress(RejectedError):  # other templates are compiled by the first turn
            await self.workers.run(lambda: self.tokenizer.render(words, None, {}))

    def _prompt(self) -> str:
        """Return words, on a grid for more than one block; for half of a small context at most."""
        prompt, encode = " ".join([_WORDS] * 6), self.tokenizer.encode
        tokens_min = BLOCK_TOKENS + 1 if self.identity.settings.exact_chunks else 1
        while len(encode(prompt).ids) <= tokens_min:
            prompt = f"{prompt} {prompt}"
        while len(encode(prompt).ids) > self.identity.model.context_tokens_max // 2:
            prompt = prompt[: len(prompt) // 2]
        return prompt

    async def ask(self) -> tuple[Admitted, list[tuple[str, float | None]]]:
        """Run a turn; return its admission and its answer."""
        request = GenerateRequest(
            operation=OperationId("selftest-1"),
            tenant=SELF_TEST_TENANT,
            identity=Identity(IdentityKind.AGENT, AGENT),
            # Log probabilities make the comparison bit-exact instead of merely equal in words.
            sampling=Sampling(max_tokens=_ANSWER_TOKENS, logprobs=1, ignore_eos=True),
            prompt=self._prompt(),
        )
        admitted: Admitted | None = None
        answer: list[tuple[str, float | None]] = []
        last: Event | None = None
        async for event in self.turns.serve(request):
            last = event
            if isinstance(event, Admitted):
                admitted = event
            elif isinstance(event, Delta):
                answer += [(entry.token, entry.logprob) for entry in event.logprobs]
        if isinstance(last, Failed) and last.code == FabricError.code:
            raise FabricError(last.message)
        if not isinstance(last, Finished):  # cancelled, handed over for its memory, or refused
            message = last.message if isinstance(last, Failed) else "its turn did not end"
            raise RetryLaterError(message)
        if admitted is None or not answer:
            message = "no answer"
            raise FabricError(message)
        return admitted, answer


class SelfTests:
    """Self-tests of a node; used on its event loop."""

    def __init__(
        self,
        clock: Clock,
        records: AgentRecords,
        questions: Questions,
        turns: LiveTurns,
        health: Health,
    ) -> None:
        self._clock = clock
        self._records = records
        self._questions = questions
        self._turns = turns
        self._health = health
        self._waits = BackOff(2 * FLUSH_IDLE_S, SELF_TEST_RETRY_S_MAX)
        self._retry_at_s = 0.0
        self.found = UNTESTED
        self.is_sure = False  # the test was conclusive

    async def run(self) -> SelfTest:
        """Test whether an agent gives the same answer after its KV cache was saved and restored.

        If the answers differ, the node reuses no caches. If the disk refuses, or other turns run
        during the test, the result is inconclusive, and `retry` repeats the test.
        """
        began, health = self._clock.monotonic_s(), self._health
        if health.problem is not None:
            outcome: tuple[bool | None, str] = False, f"served without reuse: {health.problem}"
        else:
            outcome = await self._try()
        passed, detail = outcome
        self.found = SelfTest(bool(passed), detail, self._clock.monotonic_s() - began)
        self.is_sure = passed is not None
        if passed is False:
            health.problem = health.problem or detail
        if passed is None:
            health.troubles[SELF_TEST] = f"the self-test was not conclusive: {detail}"
        else:
            health.troubles.pop(SELF_TEST, None)
        if not passed:
            _log.error("self-test: %s", detail)
        return self.found

    async def retry(self) -> None:
        """Repeat an inconclusive test with growing pauses, while no turn runs."""
        if self.is_sure or self._turns or self._health.state != "ready":
            return
        if self._clock.monotonic_s() >= self._retry_at_s:
            await self.run()
            self._retry_at_s = self._clock.monotonic_s() + self._waits.next_s()

    async def _try(self) -> tuple[bool | None, str]:
        """Return whether the agent was restored, or None if unknown, and the details."""
        begun_before = self._turns.begun_count
        try:
            await self._clean_up()  # remains of an earlier attempt
            await self._questions.render_once()
            passed, detail = await self._compare()
            await self._clean_up()
        except (DiskError, RetryLaterError, RetryElsewhereError) as error:
            reason = error.reason if isinstance(error, DiskError) else error.message
            return None, reason
        except FabricError as error:
            return False, f"{error.code}: {error.message}"
        if passed is False and self._turns.begun_count > begun_before + _TURNS:
            return None, f"{detail} beside other turns"  # whose batches change rounding
        return passed, detail

    async def _clean_up(self) -> None:
        """Remove the test's agent; raise DiskError."""
        table, store, run = self._records.table, self._records.store, self._records.workers.run
        agent = table.get(KEY)
        if agent is None:
            return
        saved = agent.saved
        if saved is not None:
            refs = await run(lambda: store.erase_record(KEY, saved))
            table.remove(agent.key)  # releases its blocks, even if the disk keeps them
            await run(lambda: store.erase_blocks(refs))
            return
        if not await run(lambda: store.settle(KEY)):
            message = "a record of the self-test stays"
            raise DiskError(message)
        table.remove(agent.key)

    async def _compare(self) -> tuple[bool | None, str]:
        questions = self._questions
        _, first = await questions.ask()
        agent = self._records.table.get(KEY)
        if agent is None or not agent.is_durable:
            return None, self._health.troubles.get(SAVING, "the agent was not saved")
        agent.cache = None
        admitted, second = await questions.ask()
        if admitted.cache is not CacheTier.DISK:
            # No wrong bytes were read, if any could be read at all.
            return None, f"expected a restore from disk, got {admitted.cache}"
        if admitted.cached_tokens != questions.identity.usable_prefix(admitted.prompt_tokens - 1):
            return None, f"restored {admitted.cached_tokens} of {admitted.prompt_tokens} tokens"
        if first != second:
            return False, "the restored agent answers differently"
        return True, f"restored {admitted.cached_tokens} tokens and got the same answer"
