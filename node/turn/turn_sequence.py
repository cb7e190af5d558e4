"""What a turn hands to the engine: its prompt, its answer, and what to do on the way."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import BLOCK_TOKENS
from fabric.record.state_points import state_points
from fabric.turn.generation import CacheTier, GenerateRequest
from fabric.turn.prompt_limit import PromptLimit
from node.agents.agent import Agent
from node.engine.sequence import Broke, Ended, Granted, Sequence, SequenceEvent
from node.mlx.answer import Answer
from node.turn.prefix import Prepared
from node.turn.request_prompt import render

if TYPE_CHECKING:
    from node.node import Node


def begin_answer(node: "Node", request: GenerateRequest, limit: PromptLimit) -> tuple[str, Answer]:
    """Return the prompt's text and the answer to it, fed with what was produced elsewhere.

    Raises RejectedError where the prompt cannot be rendered, or is far over `limit`.
    """
    text = render(node, request, limit)
    answer = Answer(node.tokenizer, text, request.sampling.stop, request.tools)
    if request.resume is not None:
        for token in request.resume.answer_ids:
            answer.push(token)
    return text, answer


def stops_of(node: "Node", prepared: Prepared) -> tuple[int, ...]:
    """Say where the prompt's computing pauses so that a recurrent state can be kept."""
    if not node.reuses or CacheGroup.STATE not in node.spec.groups:
        return ()
    special_ids, on_grid = node.tokenizer.cut_texts.keys(), node.settings.exact_chunks
    return state_points(prepared.plan.ids, special_ids, prepared.cached, on_grid=on_grid)


def make_sequence(
    node: "Node",
    request: GenerateRequest,
    prepared: Prepared,
    answer: Answer,
    emit: Callable[[SequenceEvent], None],
) -> Sequence:
    """Make the sequence; `emit` is called from the engine thread."""
    asked, ids, resume = request.sampling, prepared.plan.ids, request.resume
    before = list(resume.answer_ids) if resume is not None else []
    # A resumption's prompt ends with the answer so far and the token drawn next.
    prompt_count = len(ids) - (len(before) + 1 if resume is not None else 0)
    room = node.context_tokens_max - prompt_count
    seed = resume.seed if resume is not None else asked.seed

    def granted() -> None:
        if sequence.awaited_tokens is None:  # nothing is reused, or this is not the first time
            sequence.cache.reserve(prepared.room_tokens)
            return
        sequence.cache = prepared.begin(node)
        if prepared.source is None:
            sequence.awaited_tokens = None
        else:
            emit(Granted())

    def reached(tokens_count: int) -> None:
        if tokens_count in sequence.stops:
            sequence.cache.take_snapshot()

    sequence = Sequence(
        cache=prepared.cache,
        prompt=ids,
        sampling=replace(asked, max_tokens=max(1, min(asked.max_tokens, room))),
        seed=seed if seed is not None else secrets.randbits(63),
        answer=answer,
        emit=emit,
        stop_ids=node.tokenizer.eos_ids,
        token_text=node.tokenizer.token_text,
        tenant=request.tenant,
        priority=request.priority,
        reserve_bytes=node.spec.resident_bytes(prepared.room_tokens),
        room_tokens=-(-prepared.room_tokens // BLOCK_TOKENS) * BLOCK_TOKENS,
        grown_bytes=node.spec.resident_bytes,
        is_preemptible=lambda: node.reuses,
        granted=granted,
        awaited_tokens=None if prepared.tier is CacheTier.COLD else prepared.cached,
        stops=stops_of(node, prepared),
        owns_reservation=True,
        resumed=resume,
        answer_ids=before,
        reached=reached,
    )
    return sequence


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
