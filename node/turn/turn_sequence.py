"""Build the engine's sequence for a turn, and submit it together with the agent's cache."""

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
    Computed,
    Granted,
    Head,
    PromptEcho,
    Sequence,
    SequenceEvent,
    SequenceInput,
    TrimmedEnd,
)
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.device import device_errors
from node.prompt.pipeline import SpelledPrompt
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.tiers.hot_tier import HotTier
from node.turn.heads import TurnHeads
from node.turn.prefix import Prefixes
from node.turn.prepared import Prepared


@dataclass(frozen=True, slots=True)
class Sequences:
    """Builder of the engine's sequences for a node's turns."""

    identity: NodeIdentity
    tokenizer: ChatTokenizer
    prefixes: Prefixes
    engine: EngineThread
    hot: HotTier
    health: Health
    heads: TurnHeads

    def check_memory(self, prompt_tokens: int) -> None:
        """Raise RejectedError if a prompt of this size can never fit in this node's memory."""
        self.engine.budget.check(self.identity.spec.resident_bytes(prompt_tokens))

    def stops_of(self, prepared: Prepared) -> tuple[int, ...]:
        """Return where prefill pauses so that a recurrent state can be kept."""
        if not self._keeps_states(prepared):
            return ()
        plan, on_grid = prepared.plan, self.identity.settings.exact_chunks
        return state_points(len(plan.ids), plan.marks, prepared.cached, on_grid=on_grid)

    def _keeps_states(self, prepared: Prepared) -> bool:
        has_states = CacheGroup.STATE in self.identity.spec.groups
        return prepared.is_kept and self.health.reuses and has_states

    def _trimmed_end(self, request: GenerateRequest, prepared: Prepared) -> TrimmedEnd | None:
        """Return a finder of the answer's trimmed end, where a state is to be kept there."""
        always = prepared.plan.marks.trims_answers
        has_calls = bool(request.tools) and request.reads_calls
        on_grid = self.identity.settings.exact_chunks  # no answer's text ends on the grid
        if on_grid or not (self._keeps_states(prepared) and (always or has_calls)):
            return None
        return TrimmedEnd(always, len(prepared.plan.ids) + STATE_GAP_TOKENS_MIN)

    def make(
        self,
        request: GenerateRequest,
        prepared: Prepared,
        prompt: SpelledPrompt,
        emit: Callable[[SequenceEvent], None],
        head: Head | None,
    ) -> Sequence:
        """Return the sequence; `emit` is called from the engine thread."""
        sampling, ids, resume = request.sampling, prepared.plan.ids, request.resume
        spec = self.identity.spec
        before = list(resume.answer_ids) if resume is not None else []
        # A resumption's prompt ends with the answer so far and the token sampled next.
        prompt_count = len(ids) - (len(before) + 1 if resume is not None else 0)
        room = self.identity.model.context_tokens_max - prompt_count
        is_hot = prepared.tier is not CacheTier.COLD
        seed = resume.seed if resume is not None else sampling.seed

        def granted() -> None:
            with device_errors():  # an error may be the stored one of other sequences' step
                if sequence.awaited_tokens is None:  # nothing is reused, or granted again
                    sequence.cache.reserve(prepared.room_tokens)
                    return
                sequence.cache = self.prefixes.begin(prepared)
            if not prepared.is_stored:
                sequence.awaited_tokens = None
            else:
                emit(Granted())

        def reached(tokens_count: int) -> None:
            if tokens_count in sequence.stops:
                with device_errors():
                    sequence.cache.take_snapshot()
            if tokens_count < len(ids) - 1:
                emit(Computed(tokens_count))

        sequence = Sequence(
            SequenceInput(
                prompt=ids,
                sampling=replace(sampling, max_tokens=max(1, min(sampling.max_tokens, room))),
                seed=seed if seed is not None else secrets.randbits(63),
                stop_ids=self.tokenizer.eos_ids,
                token_text=self.tokenizer.token_text,
                tenant=request.tenant,
                priority=request.priority,
                weight=request.weight,
                resumed=resume,
                was_admitted=request.was_admitted,
                matcher=prompt.matcher,
                budget=prompt.budget,
                grown_bytes=spec.resident_bytes,
                is_preemptible=lambda: request.is_kept and self.health.reuses,
                owns_reservation=True,
            ),
            cache=prepared.cache,
            answer=prompt.answer,
            emit=emit,
            reserve_bytes=spec.resident_bytes(prepared.room_tokens) + prepared.waiting_bytes(spec),
            room_tokens=-(-prepared.room_tokens // BLOCK_TOKENS) * BLOCK_TOKENS,
            granted=granted,
            awaited_tokens=prepared.cached if prepared.is_stored or is_hot else None,
            stops=self.stops_of(prepared),
            reached=reached,
            trimmed=self._trimmed_end(request, prepared),
            echo=_echo(request, prepared),
            head=head,
            answer_ids=before,
        )
        return sequence

    def submit(self, agent: Agent, sequence: Sequence, prepared: Prepared) -> None:
        """Hand the sequence and the agent's cache to the engine, or neither."""
        hot, cache, budget = self.hot, prepared.cache, self.engine.budget
        sequence.reservation = reservation = Reservation(budget)
        held_bytes = cache.size_bytes  # before the engine may change it
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
        assert sequence.reservation is not None, "`submit` created one"
        sequence.reservation.release()
        self.engine.heads.end(sequence)
        if sequence.head is not None:
            self.heads.end(sequence.head)
        self.hot.note()
        self.engine.wake()


def _echo(request: GenerateRequest, prepared: Prepared) -> PromptEcho | None:
    if not request.echo:
        return None
    return PromptEcho(prepared.plan.text.decode(), [] if request.is_scored else None)
