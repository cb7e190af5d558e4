"""One iteration of the engine: place sequences, decode one step of all, prefill one chunk.

The thread around it is node/engine/engine_thread.py; the decisions are in node/engine/policy.py.
"""

from collections.abc import Callable
from functools import partial

from fabric.errors import EngineFailedError
from fabric.ports import Clock
from fabric.turn.generation import FinishReason
from node.engine.decode_step import (
    Growth,
    decode_step,
    emit_event,
    end,
    fail,
    grow,
    hand_over,
    note_scored,
    victim,
)
from node.engine.heads import Heads
from node.engine.memory_budget import MemoryBudget, Reservation
from node.engine.moving_streams import MovingStreams, PrefillHold
from node.engine.policy import (
    Capacity,
    Preempt,
    Start,
    is_warm,
    next_move,
    next_prompt,
    next_starved,
    without_second_delay,
)
from node.engine.prefill_chunks import Speed, prefill_chunk_tokens
from node.engine.run_queue import RunQueue
from node.engine.sequence import Sequence, Started
from node.limits import (
    BACKGROUND_PROMOTED_MAX,
    DEVICE_POOL_PREFILL_TOKENS,
    DEVICE_POOL_STEPS,
    PAUSED_SEQUENCES_MAX,
    SCORED_CHUNK_TOKENS,
)
from node.mlx.device import DeviceError
from node.mlx.engine import Engine, Logits

_MEASURED_CHUNK_TOKENS = 128  # shorter ones measure the overhead, not the speed


class Scheduler:
    """Scheduler of an engine's sequences; every method runs on the engine thread."""

    def __init__(
        self,
        clock: Clock,
        budget: MemoryBudget,
        *,
        active_max: int,
        exact_chunks: bool,
        moving: MovingStreams | None = None,
    ) -> None:
        self.engine: Engine | None = None
        self.queue = RunQueue()
        self.heads = Heads()
        self.prefill_speed = Speed()
        self.decode_speed = Speed()
        self.preempted_count = 0
        self.turn_speed = Speed()  # completed turns of one slot
        self._clock = clock
        self._budget = budget
        self._active_max = active_max
        self._exact = exact_chunks
        self._moving = moving or MovingStreams(clock)
        self._hold = PrefillHold(clock, self._moving)
        self._arrivals_count = 0
        self._chunks_count = 0
        self._delays_arrivals = False  # the last chunk was a background prompt's
        self._warm_streak = 0
        self._served: dict[str, float] = {}  # virtual time of each tenant's next chunk
        self._chunks_virtual = 0.0  # virtual time of the last chunk
        self._starts_count = 0
        self._steps_count = 0  # steps since memory of freed arrays was returned
        self._started: dict[str, int] = {}  # number of each tenant's last start

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, and count the memory of its cache."""
        self._arrivals_count += 1
        sequence.order = self._arrivals_count
        sequence.served_s = self._clock.monotonic_s()
        sequence.is_delayed = self._delays_arrivals  # it may have arrived during that chunk
        reservation = sequence.reservation or Reservation(self._budget)
        sequence.reservation = reservation
        self.queue.waiting.append(sequence)
        self._run_guarded(sequence, lambda: reservation.count(sequence.cache.size_bytes))

    def iterate(self) -> bool:
        """Run one iteration; return whether there was anything to do.

        Raise DeviceError where the device failed.
        """
        self._grow_answers()
        self._drop_cancelled()
        self._promote()
        # `any` of a list, so that all four steps run.
        return any([self._place(), self._start_prefilled(), self._decode(), self._prefill()])

    def fail_all(self, error: Exception) -> None:
        """Fail all sequences, each with its own error: a traceback holds the frames of its turn."""
        is_device = isinstance(error, DeviceError)
        for sequence in self.queue:
            self._fail(sequence, EngineFailedError() if is_device else error)

    def end_all(self) -> None:
        for sequence in self.queue:
            end(sequence, None)
            self._leave(sequence)

    def _drop_cancelled(self) -> None:
        for sequence in self.queue:
            if sequence.cancelled.is_set():
                end(sequence, None)
                self._leave(sequence)
            elif sequence.yielding.is_set() and sequence.can_yield:
                self._run_guarded(sequence, partial(self._hand_over, sequence))

    def _hand_over(self, sequence: Sequence) -> None:
        slot = sequence.slot
        sampled = self._ready_engine.peek(slot) if slot is not None else None
        self._ready_engine.check()
        hand_over(sequence, sampled)
        self._leave(sequence)

    def _promote(self) -> None:
        """Promote a starved background sequence."""
        if sum(sequence.is_promoted for sequence in self.queue) >= BACKGROUND_PROMOTED_MAX:
            return
        unserved = [sequence for sequence in self.queue.undecoded if not sequence.is_urgent]
        starved = next_starved(unserved, self._clock.monotonic_s())
        if starved is not None:
            starved.is_promoted = True

    def _grow_answers(self) -> None:
        """Reserve memory for growing answers, before any new sequence gets some."""
        for sequence in list(self.queue.decoding):
            self._run_guarded(sequence, partial(self._grow, sequence))

    def _grow(self, sequence: Sequence) -> None:
        growth = grow(sequence, _held(sequence), self._budget)
        if growth is Growth.END:  # treated like the end of the context
            end(sequence, FinishReason.LENGTH)
            self._leave(sequence)
        elif growth is Growth.WAIT:
            self._preempt_for(sequence)

    def _preempt_for(self, sequence: Sequence) -> None:
        """Preempt one answer, perhaps this one, for its memory; this one waits for it."""
        active = [*self.queue.decoding, *self.queue.paused]
        if len(active) > 1 and not any(other.yielding.is_set() for other in active):
            giving = victim(other for other in active if other.slot is not None)
            if giving is not None:
                giving.is_preempted = True
                giving.yielding.set()  # it leaves before the next step
        if len(self.queue.paused) < PAUSED_SEQUENCES_MAX:
            self._preempt(Preempt(sequence))
        else:
            _held(sequence).count(sequence.reserve_bytes)

    def _place(self) -> bool:
        """Start, pause and resume as the policy decides; return whether the running set changed."""
        queue, has_room = self.queue, True
        waiting = self._without_held()
        if not (queue.waiting or queue.paused):  # most often
            return False
        ran = {id(sequence) for sequence in queue.running}
        while waiting or queue.paused:
            room = Capacity(
                slots=self._active_max - sum(not s.is_promoted for s in queue.running),
                paused=PAUSED_SEQUENCES_MAX - len(queue.paused),
                memory_bytes=self._budget.claimable_bytes if has_room else 0,
            )
            move = next_move(waiting, queue.paused, queue.running, room, self._started)
            if move is None:
                break
            if isinstance(move, Preempt):
                self._preempt(move)
            elif not self._start(move):
                has_room = False  # waits for the eviction of idle caches
            waiting = self._without_held()
        self._make_way(waiting)
        is_shed = False
        if (waiting or queue.paused) and self._may_force():
            first = min([*waiting, *queue.paused], key=lambda s: (not s.is_urgent, s.order))
            is_shed = self._shed(first)
            if not is_shed:
                self._start(Start(first))
        # A sequence that was paused for one without memory runs again: that is no change.
        return is_shed or {id(sequence) for sequence in queue.running} != ran

    def _make_way(self, waiting: list[Sequence]) -> None:
        """Make a background sequence give its memory to an interactive one that lacks only that."""
        if sum(s.is_urgent for s in self.queue.running) >= self._active_max:
            return
        free_bytes = max(0, self._budget.claimable_bytes)
        lacks = (s.is_urgent and s.needs_bytes > free_bytes for s in [*waiting, *self.queue.paused])
        if not any(lacks) or any(other.yielding.is_set() for other in self.queue):
            return
        holders = [*self.queue.running, *self.queue.paused]
        giving = victim(s for s in holders if not s.is_urgent and _held(s).size_bytes > 0)
        if giving is not None:
            giving.is_preempted = True
            giving.yielding.set()  # it leaves before the next step

    def _without_held(self) -> list[Sequence]:
        """List the waiting sequences, except those that wait for another one's head."""
        prompts_count = max(1, len(self.queue.prefilling))
        tokens_per_s = self.prefill_speed.per_s / prompts_count
        return self.heads.without_held(self.queue.waiting, self._clock.monotonic_s(), tokens_per_s)

    def _shed(self, first: Sequence) -> bool:
        """Preempt a waiting sequence with a cache if the budget is exceeded without `first`.

        Only the first may exceed the budget. A preempted sequence that is requested again at once
        would be a second one.
        """
        others_bytes = self._budget.reserved_bytes - _held(first).size_bytes
        if others_bytes <= self._budget.total_bytes:
            return False
        candidates = [s for s in self.queue.waiting if s is not first and _held(s).size_bytes > 0]
        giving = victim(candidates)
        if giving is not None:
            giving.yielding.set()  # its memory is freed before another sequence is placed
        return giving is not None

    def _start(self, move: Start[Sequence]) -> bool:
        sequence = move.sequence
        is_grant = sequence.needs_bytes > 0 or sequence in self.queue.waiting
        if not _held(sequence).grow(sequence.reserve_bytes, force=self._may_force()):
            return False
        for other in move.passed:
            other.passed_count += 1
        sequence.served_s = self._clock.monotonic_s()
        if sequence.started_s is None:
            sequence.started_s = sequence.served_s
        self._starts_count += 1
        self._started[sequence.tenant] = self._starts_count
        self.queue.run(sequence)
        self.heads.begin(sequence)
        if is_grant and sequence.granted is not None:
            self._run_guarded(sequence, sequence.granted)
        return True

    def _may_force(self) -> bool:
        """Return whether one must run over the limit, as the other caches cannot be evicted."""
        if self.queue.running or not all(s.needs_bytes for s in self.queue.paused):
            return False
        # The rest is reserved by ended sequences, which are about to release it.
        known_bytes = sum(_held(sequence).size_bytes for sequence in self.queue)
        return self._budget.reserved_bytes <= known_bytes

    def _preempt(self, move: Preempt[Sequence]) -> None:
        self.preempted_count += 1
        move.sequence.served_s = self._clock.monotonic_s()
        self.queue.pause(move.sequence)
        self.heads.pause(move.sequence)

    def _start_prefilled(self) -> bool:
        """Move completely prefilled prompts into the batch."""
        ready = [s for s in self._unblocked_prompts() if s.prefill_left <= 0]
        for sequence in ready:
            self._run_guarded(sequence, partial(self._begin, sequence))
        return bool(ready)

    def _begin(self, sequence: Sequence, logits: Logits | None = None) -> None:
        """Begin to decode; sample the first token from the last chunk's `logits`, if given."""
        engine = self._ready_engine
        slot = engine.start(
            sequence.cache, sequence.input.prompt, sequence.input.sampling, sequence.input.seed
        )
        slot.matcher = sequence.input.matcher
        slot.budget = sequence.input.budget
        slot.keeps_marks = sequence.trimmed is not None
        if sequence.input.resumed is not None:
            slot.take_up(len(sequence.answer_ids) + 1)
        if logits is not None:
            engine.sample_first(slot, logits)
        sequence.slot = slot
        self.queue.run(sequence)
        emit_event(sequence, Started())

    def _decode(self) -> bool:
        decoding = self.queue.decoding
        if not decoding:
            return False
        began_s = self._clock.monotonic_s()
        fresh = any(s.slot is not None and not s.slot.pending_is_sampled for s in decoding)
        self._step()
        if fresh and decoding:
            self._step()  # reads a new sequence's first token at once
        if decoding and not fresh:
            self.decode_speed.add(len(decoding), self._clock.monotonic_s() - began_s)
        return True

    def _step(self) -> None:
        self._steps_count += 1
        if self._steps_count >= DEVICE_POOL_STEPS:
            self.return_unused()
        for sequence in decode_step(self._ready_engine, list(self.queue.decoding)):
            if sequence.started_s is not None:
                self.turn_speed.add(1, self._clock.monotonic_s() - sequence.started_s)
            self._leave(sequence)

    def return_unused(self) -> None:
        """Return the memory of freed arrays; raise DeviceError where the device failed."""
        self._steps_count = 0
        self._ready_engine.return_unused()

    def _prefill(self) -> bool:
        ready = [sequence for sequence in self._unblocked_prompts() if not sequence.is_preempted]
        if ready and self._hold.holds():
            ready = [sequence for sequence in ready if sequence.is_resumed]
        self._delays_arrivals = False
        ready = without_second_delay(ready, self._delayable())
        sequence = next_prompt(ready, self._warm_streak, self._served)
        if sequence is None:
            return False
        others_wait = any(not is_warm(other) for other in ready)
        self._warm_streak = self._warm_streak + 1 if is_warm(sequence) and others_wait else 0
        self._run_guarded(sequence, partial(self._compute_chunk, sequence))
        return True

    def _compute_chunk(self, sequence: Sequence) -> None:
        if sequence.prefill_left <= 0:  # its prefix was restored during this iteration
            self._begin(sequence)
            return
        engine, cache = self._ready_engine, sequence.cache
        position = cache.tokens_count
        count = prefill_chunk_tokens(
            position,
            sequence.chunk_left,
            largest=engine.chunk_tokens_max if sequence.scored is None else SCORED_CHUNK_TOKENS,
            busy=self._note_delays(sequence) or self._is_waited_for(),
            exact=self._exact,
            tokens_per_s=self.prefill_speed.per_s,
            pairs_max=engine.pairs_max(position),
            stops=sequence.stops,
        )
        began_s = self._clock.monotonic_s()
        samples_first = not self._exact and sequence.can_sample_first(count)
        count += samples_first
        tokens, end = sequence.input.prompt[position : position + count], position + count
        logits = None  # kept for the first token only: they hold the chunk's activations
        if samples_first:
            logits = engine.prefill(cache, tokens)
        elif sequence.scored is None:
            engine.prefill(cache, tokens)
        else:
            following = sequence.input.prompt[position + 1 : end + 1]
            alternatives = sequence.input.sampling.logprobs or 0
            note_scored(sequence, engine.score(cache, tokens, following, alternatives))
        if count >= DEVICE_POOL_PREFILL_TOKENS:
            self.return_unused()
        sequence.served_s = self._clock.monotonic_s()
        self._chunks_count += 1
        sequence.served_order = self._chunks_count
        began = max(self._chunks_virtual, self._served.get(sequence.tenant, 0.0))
        self._chunks_virtual = began
        self._served[sequence.tenant] = began + 1 / sequence.weight
        if count >= _MEASURED_CHUNK_TOKENS:
            self.prefill_speed.add(count, sequence.served_s - began_s)
        if sequence.reached is not None:
            sequence.reached(cache.tokens_count)
        if sequence.prefill_left <= 0:
            self._begin(sequence, logits)

    def _delayable(self) -> list[Sequence]:
        """List the prompts that a background chunk would delay.

        While no interactive sequence runs, one that lacks memory or a slot may wait for just the
        background ones that hold them.
        """
        queue, undecoded = self.queue, self.queue.undecoded
        if any(sequence.is_urgent for sequence in queue.running):
            return undecoded
        free_bytes = max(0, self._budget.claimable_bytes)
        has_slot = sum(not s.is_promoted for s in queue.running) < self._active_max
        return [s for s in undecoded if has_slot and s.needs_bytes <= free_bytes]

    def _note_delays(self, sequence: Sequence) -> bool:
        """Note which interactive prompts a background one's chunk delays; return whether any."""
        if sequence.is_urgent:
            return False
        self._delays_arrivals = True
        delayed = [other for other in self.queue.undecoded if other.is_urgent]
        for other in delayed:
            other.is_delayed = True
        return bool(delayed)

    def _is_waited_for(self) -> bool:
        """Return whether a stream waits for the chunk: a local one, or one on its way here."""
        moving = self._moving
        return bool(self.queue.decoding) or moving.are_coming or moving.are_silent

    def _unblocked_prompts(self) -> list[Sequence]:
        prompts = []
        for sequence in list(self.queue.prefilling):
            try:
                is_blocked = sequence.awaited_tokens is not None or sequence.is_blocked()
            except Exception as error:  # noqa: BLE001 - one prompt's failure ends only itself
                self._fail(sequence, error)
                continue
            if not is_blocked:
                prompts.append(sequence)
        return prompts

    def _run_guarded(self, sequence: Sequence, work: Callable[[], None]) -> None:
        """Run one sequence's work; its failure ends only itself, the device's ends all."""
        try:
            work()
        except DeviceError:
            raise
        except Exception as error:  # noqa: BLE001 - isolate the failing sequence
            self._fail(sequence, error)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        fail(sequence, error)
        self.heads.end(sequence)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.queue.remove(sequence)
        self.heads.pause(sequence)
        if not any(other.tenant == sequence.tenant for other in self.queue):
            self._served.pop(sequence.tenant, None)
        if not any(self.queue):  # a tenant that returns earlier keeps its place
            self._started.clear()
        if not sequence.input.owns_reservation:
            _held(sequence).release()

    @property
    def _ready_engine(self) -> Engine:
        assert self.engine is not None, "the engine is not built yet"
        return self.engine


def _held(sequence: Sequence) -> Reservation:
    assert sequence.reservation is not None, "every queued sequence has one"
    return sequence.reservation
