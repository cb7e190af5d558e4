"""What a turn hands to the engine: its prompt, its answer, and what to do on the way."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from fabric.errors import FabricError
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import BLOCK_TOKENS, STATE_GAP_TOKENS_MIN
from fabric.record.state_points import state_points
from fabric.turn.generation import CacheTier, GenerateRequest
from node.agents.agent import Agent
from node.engine.engine_thread import EngineThread
from node.engine.memory_budget import Reservation
from node.engine.sequence import (
    Broke,
    Computed,
    Ended,
    Granted,
    PromptEcho,
    Sequence,
    SequenceEvent,
)
from node.engine.trimmed_end import TrimmedEnd
from node.mlx.answer import Answer
from node.mlx.chat_tokenizer import ChatTokenizer
from node.prompt.restored_answers import ShownAnswer
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.tiers.hot_tier import HotTier
from node.turn.prefix import Prefixes
from node.turn.prepared import Prepared


@dataclass(frozen=True, slots=True)
class Sequences:
    """Builds the engine's sequences for a node's turns."""

    identity: NodeIdentity
    tokenizer: ChatTokenizer
    prefixes: Prefixes
    engine: EngineThread
    hot: HotTier
    health: Health

    def begin_answer(self, request: GenerateRequest, text: str, seen: ShownAnswer) -> Answer:
        """Return the answer to the prompt `text`, fed with what others produced and showed."""
        answer = Answer(
            self.tokenizer,
            text,
            request.sampling.stop,
            request.tools if request.reads_calls else None,
            is_chat=request.messages is not None or request.extends,
            call_seed=request.operation,
            choice=request.calls,
        )
        if request.resume is not None:
            for token in request.resume.answer_ids:
                seen.add(answer.push(token))
        return answer

    def stops_of(self, prepared: Prepared) -> tuple[int, ...]:
        """Say where the prompt's computing pauses so that a recurrent state can be kept."""
        if not self._keeps_states(prepared):
            return ()
        plan, on_grid = prepared.plan, self.identity.settings.exact_chunks
        return state_points(len(plan.ids), plan.marks, prepared.cached, on_grid=on_grid)

    def _keeps_states(self, prepared: Prepared) -> bool:
        has_states = CacheGroup.STATE in self.identity.spec.groups
        return prepared.is_kept and self.health.reuses and has_states

    def _trimmed(self, request: GenerateRequest, prepared: Prepared) -> TrimmedEnd | None:
        """Follow an answer that may come back with another end, where states are kept."""
        always = prepared.plan.marks.trims_answers
        has_calls = bool(request.tools) and request.reads_calls
        on_grid = self.identity.settings.exact_chunks  # on which no answer's text ends
        if on_grid or not (self._keeps_states(prepared) and (always or has_calls)):
            return None
        return TrimmedEnd(always, len(prepared.plan.ids) + STATE_GAP_TOKENS_MIN)

    def make(
        self,
        request: GenerateRequest,
        prepared: Prepared,
        answer: Answer,
        emit: Callable[[SequenceEvent], None],
    ) -> Sequence:
        """Make the sequence; `emit` is called from the engine thread."""
        asked, ids, resume = request.sampling, prepared.plan.ids, request.resume
        spec = self.identity.spec
        before = list(resume.answer_ids) if resume is not None else []
        # A resumption's prompt ends with the answer so far and the token sampled next.
        prompt_count = len(ids) - (len(before) + 1 if resume is not None else 0)
        room = self.identity.model.context_tokens_max - prompt_count
        seed = resume.seed if resume is not None else asked.seed

        def granted() -> None:
            if sequence.awaited_tokens is None:  # nothing is reused, or this is not the first time
                sequence.cache.reserve(prepared.room_tokens)
                return
            sequence.cache = self.prefixes.begin(prepared)
            if prepared.source is None:
                sequence.awaited_tokens = None
            else:
                emit(Granted())

        def reached(tokens_count: int) -> None:
            if tokens_count in sequence.stops:
                sequence.cache.take_snapshot()
            if tokens_count < len(ids) - 1:
                emit(Computed(tokens_count))

        sequence = Sequence(
            cache=prepared.cache,
            prompt=ids,
            sampling=replace(asked, max_tokens=max(1, min(asked.max_tokens, room))),
            seed=seed if seed is not None else secrets.randbits(63),
            answer=answer,
            emit=emit,
            stop_ids=self.tokenizer.eos_ids,
            token_text=self.tokenizer.token_text,
            tenant=request.tenant,
            priority=request.priority,
            reserve_bytes=spec.resident_bytes(prepared.room_tokens) + prepared.waiting_bytes(spec),
            room_tokens=-(-prepared.room_tokens // BLOCK_TOKENS) * BLOCK_TOKENS,
            grown_bytes=spec.resident_bytes,
            is_preemptible=lambda: request.is_kept and self.health.reuses,
            granted=granted,
            awaited_tokens=None if prepared.tier is CacheTier.COLD else prepared.cached,
            stops=self.stops_of(prepared),
            trimmed=self._trimmed(request, prepared),
            owns_reservation=True,
            resumed=resume,
            was_admitted=request.was_admitted,
            echo=_echo(request, prepared),
            answer_ids=before,
            reached=reached,
        )
        return sequence

    def submit(self, agent: Agent, sequence: Sequence, prepared: Prepared) -> None:
        """Hand the sequence and the agent's cache to the engine, or neither."""
        hot, cache, budget = self.hot, prepared.cache, self.engine.budget
        sequence.reservation = reservation = Reservation(budget)
        held_bytes = cache.size_bytes  # from here on the engine may change it
        reservation.count(held_bytes)
        try:
            self.engine.submit(sequence)
        except FabricError:
            reservation.release()
            raise
        agent.cache = None
        hot.note()
        needs_bytes = max(0, sequence.reserve_bytes - held_bytes)
        if budget.claimable_bytes - budget.idle_bytes < needs_bytes <= budget.claimable_bytes:
            hot.make_room(needs_bytes)

    def release(self, sequence: Sequence) -> None:
        assert sequence.reservation is not None, "made when it was submitted"
        sequence.reservation.release()
        self.hot.note()
        self.engine.wake()


async def end_of(events: asyncio.Queue[SequenceEvent]) -> Ended | Broke:
    """Wait for a sequence's last event."""
    while not isinstance(event := await events.get(), Ended | Broke):
        pass
    return event


def is_unchanged(agent: Agent, sequence: Sequence, prepared: Prepared) -> bool:
    """Say whether nothing was computed, so that the record may stay as it is."""
    before = len(sequence.resumed.answer_ids) if sequence.resumed is not None else 0
    is_new = sequence.cache.tokens_count > prepared.cached or len(sequence.answer_ids) > before
    # Memory that was never saved is gone beyond what was reused of it.
    return not is_new and (agent.is_durable or prepared.cached == agent.manifest.tokens_count)


def _echo(request: GenerateRequest, prepared: Prepared) -> PromptEcho | None:
    if not request.echo:
        return None
    return PromptEcho(prepared.plan.text.decode(), [] if request.is_scored else None)
