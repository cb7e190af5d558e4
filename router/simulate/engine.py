"""Engine of a modelled node: a decode step of the batch, a chunk of a prompt, and so on.

    waiting ──slot and memory──▶ loading ──disk──▶ ready ──chunks──▶ decoding ──▶ ended

The order of prompts, the sizes of chunks and the shares of steps are those of a real node
(docs/scheduling.md). While nothing is prefilled, many equal steps are one event.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from fabric.ids import AgentId, NodeName
from router.limits import SIMULATED_PASSES_MAX
from router.simulate.content import Extent
from router.simulate.fleet_file import NodeModel
from router.simulate.node_cache import NodeCache
from router.simulate.timeline import Timeline

CHUNK_S: Final = 1.0  # the longest chunk, if nothing is decoded
CHUNK_BUSY_S: Final = 0.25  # beside answers
CHUNK_TOKENS: Final = 512
CHUNK_BUSY_TOKENS: Final = 128
CHUNK_STEPS: Final = ((4_096, 4_096), (16_384, 2_048), (65_536, 1_024))  # below a position
WARM_TOKENS: Final = 512  # prompts with no more left go first
WARM_STREAK: Final = 8  # but for at most this many chunks
ANSWER_RESERVE_TOKENS: Final = 512
HEAD_TOKENS: Final = 128  # shortest beginning that is worth a wait
HEAD_WAIT_FACTOR: Final = 1.5  # times the time to compute it, plus
HEAD_WAIT_S: Final = 2.0  # this; then a prompt computes the beginning itself


@dataclass(slots=True, eq=False)
class NodeTurn:
    """Turn on one node."""

    agent: AgentId
    prompt: Extent
    answer_tokens: int
    epoch: int
    sketch: tuple[int, ...]
    on_first: Callable[[], None]
    on_end: Callable[[], None]
    on_lost: Callable[[], None]
    on_progress: Callable[[int], None] = lambda _: None  # tokens of its prompt that are in place
    lender: NodeName | None = None  # from which it may take its beginning
    order: int = 0  # of arrival
    cached_tokens: int = 0  # of its prompt, when it began
    disk_tokens: int = 0  # those of them that are read from disk
    position: int = 0  # tokens of its prompt that are in place
    reserved_tokens: int = 0
    passed_count: int = 0
    served_order: int = 0  # of its last chunk
    awaited_tokens: int = 0  # tokens of its prompt that others compute or send
    held_since_s: float | None = None  # since when it waits for those
    is_waiting: bool = True  # it has no memory yet
    coming_tokens: int = 0  # tokens of its prompt that another node sends
    has_given_up: bool = False  # it waited too long for others' tokens
    has_alarm: bool = False  # a timer will end that wait
    is_awaited: bool = False  # it publishes its blocks as it computes them
    first_s: float | None = None
    is_gone: bool = False  # its node was lost
    prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """Count the prompt's tokens once: its content grows, the prompt does not."""
        self.prompt_tokens = self.prompt.tokens

    @property
    def queued_tokens(self) -> int:
        """Tokens of its prompt that it is going to compute."""
        return self.prompt_tokens - max(self.position, self.cached_tokens, self.awaited_tokens)

    @property
    def left_tokens(self) -> int:
        """Tokens of its prompt that are not in place."""
        return self.prompt_tokens - self.position


class ModelledEngine:
    """Batch, prompts and queue of one node."""

    def __init__(
        self,
        timeline: Timeline,
        model: NodeModel,
        cache: NodeCache,
        on_answered: Callable[[NodeTurn], None],
        *,
        shares_heads: bool = False,
        chunk_tokens_max: int = 4_096,
    ) -> None:
        """Start idle; `on_answered` is called when a job's last token is delivered."""
        self.slowness = 1.0  # factor on all compute times
        self.computed_tokens = 0  # of prompts
        self.reused_tokens = 0  # of prompts, when they got their memory
        self.busy_s = 0.0
        self.changes_count = 0  # changes of the turns that a node reports
        self.on_published: Callable[[], None] = lambda: None  # awaited blocks were published
        self._timeline = timeline
        self._model = model
        self._cache = cache
        self._on_answered = on_answered
        self._shares_heads = shares_heads
        self._chunk_tokens_max = chunk_tokens_max
        self._waiting: list[NodeTurn] = []
        self._arriving: NodeTurn | None = None
        self._loading: list[NodeTurn] = []
        self._ready: list[NodeTurn] = []
        self._batch: list[tuple[int, int, NodeTurn]] = []  # heap of the step at which a job ends
        self._steps = 0  # of the batch, since the start
        self._count = 0
        self._warm_streak = 0
        self._disk_free_s = 0.0
        self.has_read = False  # whether caches were read from disk
        self._version = 0  # of the event that is expected next
        self._stretch: tuple[float, float, int] | None = None  # began, seconds and number of steps
        self._is_computing = False

    @property
    def waiting_count(self) -> int:
        """Jobs without a first token."""
        return len(self._waiting) + len(self._loading) + len(self._ready)

    @property
    def decoding_count(self) -> int:
        """Jobs whose prompt is computed: what a node reports as active."""
        return len(self._batch)

    @property
    def active_count(self) -> int:
        """Running jobs in any state."""
        return len(self._loading) + len(self._ready) + len(self._batch)

    @property
    def queue_tokens(self) -> int:
        """Tokens of prompts that wait to be computed, without what others compute for them."""
        return sum(job.queued_tokens for job in (*self._waiting, *self._ready))

    def add(self, job: NodeTurn) -> None:
        """Queue a job for a slot and memory."""
        self.changes_count += 1
        self._count += 1
        job.order = self._count
        self._waiting.append(job)
        self._arriving = job
        self.grant()
        self._arriving = None

    def abandon(self) -> None:
        """Lose all jobs, as a node that dies does."""
        self.changes_count += 1
        self._waiting, self._loading, self._ready, self._batch = [], [], [], []
        self._version += 1
        self._is_computing, self._stretch = False, None
        self.on_published()

    # --- memory and disk -----------------------------------------------------------------------

    def grant(self) -> None:
        """Start waiting jobs for which there is a slot and memory, and no head to wait for."""
        still_waiting: list[NodeTurn] = []
        is_blocked = False
        for job in self._waiting:
            if is_blocked or self.active_count >= self._model.active_max:
                is_blocked = True
                still_waiting.append(job)
                continue
            if self._is_held(job):
                still_waiting.append(job)
                continue
            tokens = job.prompt_tokens + max(ANSWER_RESERVE_TOKENS, job.answer_tokens)
            if self._cache.reserve(job.agent, tokens, is_alone=not self.active_count):
                job.reserved_tokens = tokens
                self._load(job)
                continue
            job.passed_count += 1
            is_blocked = job.passed_count > SIMULATED_PASSES_MAX
            still_waiting.append(job)
        self._waiting = still_waiting

    # --- heads ---------------------------------------------------------------------------------

    def _leads(self, prompt: Extent) -> Iterator[tuple[NodeTurn, int]]:
        """Yield the jobs with memory whose prompts begin like this one, and the common tokens."""
        batch = (each for _, _, each in self._batch)
        for lead in (*self._loading, *self._ready, *batch):
            yield from _common(lead, prompt)

    def lendable(self, prompt: Extent) -> tuple[int, int]:
        """Return the published and the coming tokens of a beginning that another node awaits."""
        published = coming = 0
        for lead, common in self._leads(prompt):
            lead.is_awaited = True
            published = max(published, min(common, lead.position))
            coming = max(coming, common)
        for job in self._waiting:
            coming = max(coming, *(common for _, common in _common(job, prompt)), 0)
        return published, coming

    def _is_held(self, job: NodeTurn) -> bool:
        """Return whether a job waits, in the queue, for a beginning that others compute or send."""
        now_s = self._timeline.now_s
        present_tokens = max(job.cached_tokens, job.position)
        awaited = job.coming_tokens if job.coming_tokens > present_tokens else 0
        if not awaited and self._shares_heads:
            for lead, shared in self._leads(job.prompt):
                common = min(shared, job.prompt_tokens - 1)
                if (
                    lead.left_tokens
                    and common > lead.position
                    and common - present_tokens >= HEAD_TOKENS
                ):
                    lead.is_awaited = True
                    awaited = max(awaited, common)
        job.awaited_tokens = min(awaited, job.prompt_tokens)
        if not awaited:
            return False
        if job.held_since_s is None:
            job.held_since_s = now_s
        if job.has_given_up:
            job.awaited_tokens = 0
            return False
        prompts_count = max(1, len(self._ready))  # prompts that are computed meanwhile
        alone_s = (
            prompts_count * (awaited - present_tokens) / self.prefill_tokens_per_s(present_tokens)
        )
        until_s = job.held_since_s + HEAD_WAIT_FACTOR * alone_s + HEAD_WAIT_S
        job.has_given_up = now_s >= until_s
        if not (job.has_given_up or job.has_alarm):
            job.has_alarm = True
            self._timeline.at(until_s, self._wake, job)
        job.awaited_tokens *= not job.has_given_up
        return not job.has_given_up

    def _wake(self, job: NodeTurn) -> None:
        """Admit a job that has waited for too long."""
        job.has_alarm = False
        self.grant()

    def _find_published(self, job: NodeTurn) -> None:
        """Find the tokens that were published while a job waited."""
        best, disk = job.cached_tokens, job.disk_tokens
        if job is not self._arriving:  # it has looked them up a moment ago
            found = self._cache.look_up(job.agent, job.prompt, self._timeline.now_s)
            best, disk = found.tokens, found.disk_tokens
        for lead, common in self._leads(job.prompt):
            published = min(common, lead.position, job.prompt_tokens - 1) if lead.is_awaited else 0
            if published > best:
                best = disk = published
        if best > job.cached_tokens:
            job.cached_tokens, job.disk_tokens = best, disk

    def _load(self, job: NodeTurn) -> None:
        """Read a job's cached tokens from the disk, after the reads before it."""
        self._find_published(job)
        job.is_waiting = False
        self._loading.append(job)
        job.position = job.cached_tokens
        self.reused_tokens += job.cached_tokens
        read_bytes = job.disk_tokens * self._cache.bytes_per_token
        if not read_bytes:
            self._end_load(job)
            return
        self.has_read = True
        began_s = max(self._timeline.now_s, self._disk_free_s)
        self._disk_free_s = began_s + read_bytes / self._model.disk_bytes_per_s
        self._timeline.at(self._disk_free_s, self._end_load, job)

    def _end_load(self, job: NodeTurn) -> None:
        if job.is_gone:
            return
        self.changes_count += 1
        self._loading.remove(job)
        self._ready.append(job)
        job.on_progress(job.position)
        self._interrupt()

    # --- steps and chunks ----------------------------------------------------------------------

    def _step_s(self, batch: int) -> float:
        """Return the time of one decode step."""
        slowdown: float = batch**self._model.batch_exponent
        return self.slowness * slowdown / self._model.decode_tokens_per_s

    def prefill_tokens_per_s(self, position: int) -> float:
        """Return the speed of a chunk that begins at `position`."""
        slowdown = 1.0 + position / self._model.context_half_tokens
        return self._model.prefill_tokens_per_s / slowdown / self.slowness

    def _chunk_tokens(self, job: NodeTurn) -> int:
        is_busy = bool(self._batch)
        by_position = next((size for below, size in CHUNK_STEPS if job.position < below), 512)
        wanted = self.prefill_tokens_per_s(job.position) * (CHUNK_BUSY_S if is_busy else CHUNK_S)
        by_time = 1 << max(0, int(wanted).bit_length() - 1)
        least = CHUNK_BUSY_TOKENS if is_busy else CHUNK_TOKENS
        size = min(by_position, max(least, by_time), self._chunk_tokens_max)
        return min(job.left_tokens, size)

    def _interrupt(self) -> None:
        """Compute a new prompt as soon as the step in progress ends."""
        if not self._is_computing:
            self._iterate()
        elif self._stretch is not None:
            began_s, step_s, _ = self._stretch
            steps = max(1, math.ceil((self._timeline.now_s - began_s) / step_s - 1e-9))
            self._stretch = (began_s, step_s, steps)
            self._expect(began_s + steps * step_s, self._end_stretch)

    def _expect(self, time_s: float, action: Callable[[int], None]) -> None:
        self._version += 1
        self._timeline.at(time_s, action, self._version)

    def _iterate(self) -> None:
        """Begin a stretch of steps, or one step and one chunk."""
        now_s, batch = self._timeline.now_s, len(self._batch)
        job = self._next_prompt()
        self._is_computing = bool(batch or job)
        self._stretch = None
        if job is not None:
            step_s = self._step_s(batch) if batch else 0.0
            tokens = self._chunk_tokens(job)
            chunk_s = tokens / self.prefill_tokens_per_s(job.position)
            if batch:
                self._timeline.after(step_s, self._end_step, self._version + 1)
            self.busy_s += step_s + chunk_s
            self._count += 1
            job.served_order = self._count
            self._version += 1
            self._timeline.after(step_s + chunk_s, self._end_chunk, self._version, job, tokens)
        elif batch:
            step_s = self._step_s(batch)
            steps = max(1, self._batch[0][0] - self._steps)
            if any(job.first_s is None for _, _, job in self._batch):
                steps = 1
            self._stretch = (now_s, step_s, steps)
            self._expect(now_s + steps * step_s, self._end_stretch)

    def _next_prompt(self) -> NodeTurn | None:
        """Choose the prompt of the next chunk."""
        ready = self._ready
        if not ready:
            return None
        warm = [job for job in ready if job.left_tokens <= WARM_TOKENS]
        if warm and not (len(warm) < len(ready) and self._warm_streak >= WARM_STREAK):
            self._warm_streak += 1
            return min(warm, key=lambda job: (job.left_tokens, job.order))
        self._warm_streak = 0
        long = [job for job in ready if job.left_tokens > WARM_TOKENS]
        return min(long, key=lambda job: (job.served_order, job.order))

    def _end_stretch(self, version: int) -> None:
        if version != self._version or self._stretch is None:
            return
        _, step_s, steps = self._stretch
        self._stretch = None
        self.busy_s += steps * step_s
        self._advance(steps)
        self._iterate()

    def _end_step(self, version: int) -> None:
        """Deliver the step's tokens, before the chunk that is computed after it ends."""
        if version == self._version:
            self._advance(1)

    def _end_chunk(self, version: int, job: NodeTurn, tokens: int) -> None:
        if version != self._version:
            return
        self.changes_count += 1
        job.position += tokens
        self.computed_tokens += tokens
        job.on_progress(job.position)
        if not job.left_tokens:
            self._ready.remove(job)
            self._count += 1
            heappush(self._batch, (self._steps + max(1, job.answer_tokens), self._count, job))
        if job.is_awaited:
            self.on_published()
        if self._shares_heads and self._waiting:
            self.grant()
        self._iterate()

    def _advance(self, steps: int) -> None:
        """Count steps of the batch; deliver first and last tokens."""
        self.changes_count += 1
        self._steps += steps
        for _, _, job in self._batch:
            if job.first_s is None:
                job.first_s = self._timeline.now_s
                self._cache.answer(job.agent, job.prompt, job.first_s)
                job.on_first()
        while self._batch and self._batch[0][0] <= self._steps:
            job = heappop(self._batch)[2]
            self._cache.end_answer(job.agent)
            self._cache.release(job.reserved_tokens)
            self._on_answered(job)
            self.grant()


def _common(lead: NodeTurn, prompt: Extent) -> Iterator[tuple[NodeTurn, int]]:
    if lead.prompt.content.pieces[0] == prompt.content.pieces[0]:
        yield lead, prompt.tokens_of(lead.prompt.common_count(prompt))
