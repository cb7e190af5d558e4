"""An answer that moves near the end of its context ends there as one that did not move."""

import asyncio

import pytest

from fabric.control.node_calls import CommitMigration, Committed, Offer, SealAgent
from fabric.ids import AgentId, MigrationId, OperationId
from fabric.turn.generation import (
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    HandedOver,
    Sampling,
)
from node.turn.turn_sequence import Sequences
from tests.support.services import TENANT, ask, call, identity_of, running
from tests.support.tiny_models import LLAMA, write_model

CONTEXT_TOKENS = 300
ROOM_TOKENS = 12  # after the prompt


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    model = str(write_model(folder / "model", LLAMA))
    with (
        running(folder, model, "node-a", context_tokens_max=CONTEXT_TOKENS) as a,
        running(folder, model, "node-b", context_tokens_max=CONTEXT_TOKENS) as b,
    ):
        yield a, b


def prompt_for(service):
    text = "x" * (CONTEXT_TOKENS - ROOM_TOKENS)
    assert len(service.node.resources.tokenizer.encode(text).ids) == CONTEXT_TOKENS - ROOM_TOKENS
    return text


def on_loop(service, work):
    return asyncio.run_coroutine_threadsafe(work, service._loop).result(240)


@pytest.mark.parametrize("moved_after", range(1, ROOM_TOKENS))
def test_migration_near_the_contexts_end_does_not_change_the_answer(
    nodes, monkeypatch, moved_after
):
    a, b = nodes
    prompt, name = prompt_for(a), f"agent-{moved_after}"
    undisturbed = ask(a, prompt, agent="calm", max_tokens=100, ignore_eos=True, logprobs=0)
    assert undisturbed.finished.reason is FinishReason.LENGTH
    assert undisturbed.finished.completion_tokens == ROOM_TOKENS

    def turn(**further):
        sampling = Sampling(max_tokens=100, ignore_eos=True, logprobs=0)
        return GenerateRequest(
            OperationId(f"turn-{name}"),
            TENANT,
            identity_of(name),
            sampling,
            prompt=prompt,
            **further,
        )

    move = MigrationId(f"move-{name}-12345678")

    make = Sequences.make

    def make_sealed(self, request, prepared, answer, emit, head):
        """Make the sequence, and seal it once `moved_after` tokens exist."""
        (its_turn,) = a.node.live_turns

        def emit_and_seal(event):
            emit(event)
            if getattr(event, "index", -1) + 1 == moved_after:  # between two steps of the engine
                seal = SealAgent(TENANT, AgentId(name), 1, move, b.node.name)
                object.__setattr__(its_turn._outgoing, "seal", seal)  # from the engine's thread
                sequence.yielding.set()

        sequence = make(self, request, prepared, answer, emit_and_seal, head)
        return sequence

    async def begin():
        return [event async for event in a.node.turns.serve(turn(epoch=1))]

    with monkeypatch.context() as patch:
        patch.setattr(Sequences, "make", make_sealed)
        seen = on_loop(a, begin())
    handed = seen[-1]
    assert isinstance(handed, HandedOver)
    sealed = call(a, SealAgent(TENANT, AgentId(name), 1, move, b.node.name), Offer)
    call(b, CommitMigration(move, a.node.name, sealed, 2), Committed)

    async def resume_turn():
        return [e async for e in b.node.turns.serve(turn(epoch=2, resume=handed.resume))]

    rest = on_loop(b, resume_turn())
    assert isinstance(rest[-1], Finished), rest[-1]
    assert rest[-1].reason is FinishReason.LENGTH
    assert rest[-1].completion_tokens == ROOM_TOKENS
    text = "".join(event.text for event in [*seen, *rest] if isinstance(event, Delta))
    assert text == undisturbed.text
