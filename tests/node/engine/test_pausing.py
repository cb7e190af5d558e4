"""Preempted sequences of a real tiny engine give the same answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric.turn.generation import Priority, Sampling
from node.engine.sequence import Sequence
from tests.node.engine_bench import GREEDY, Bench, Events, at_token, drain_events, prompt_of
from tests.support.architectures import ARCHITECTURES
from tests.support.samples import sample
from tests.support.tiny_models import ONE_LAYER, write_model

SEEDED = Sampling(
    max_tokens=12, temperature=1.0, seed=5, logprobs=2, repetition_penalty=1.2, ignore_eos=True
)


@pytest.fixture(scope="module")
def one_slot_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Run an engine thread with one slot; exact chunks, so that bytes can be compared."""
    folder = write_model(tmp_path_factory.mktemp("models") / "llama", ONE_LAYER)
    rig = Bench(folder, exact_chunks=True, active_max=1)
    yield rig
    rig.thread.stop()


def interrupt(bench: Bench, sequence: Sequence, at: str) -> Events:
    """Submit an interactive sequence, and return its events."""
    urgent, events = bench.make(prompt_of(300, 99), GREEDY)
    if at == "prefill":
        sequence.reached = lambda count: bench.thread.submit(urgent) if count == 256 else None
    else:
        at_token(sequence, 5, lambda: bench.thread.submit(urgent))
    return events


@pytest.mark.parametrize("at", ["prefill", "decode"])
@pytest.mark.parametrize("sampling", sample([GREEDY, SEEDED], SEEDED), ids=["greedy", "seeded"])
def test_preempted_sequence_is_bit_equal_to_an_undisturbed_one(
    one_slot_bench: Bench, at: str, sampling: Sampling
) -> None:
    """Tokens and cache bytes are the same, and the interactive sequence ran first."""
    prompt = prompt_of(600, 1)
    whole, whole_events = one_slot_bench.submit(prompt, sampling)
    want = drain_events(whole_events).answer_ids
    paused, paused_events = one_slot_bench.make(prompt, sampling, priority=Priority.BACKGROUND)
    preempted_before = one_slot_bench.thread.preempted_count
    urgent_events = interrupt(one_slot_bench, paused, at)
    done_first = []
    at_token(paused, 11, lambda: done_first.append(not urgent_events.empty()))
    one_slot_bench.thread.submit(paused)
    got = drain_events(paused_events).answer_ids

    assert want == got
    assert one_slot_bench.bytes_of(whole.cache) == one_slot_bench.bytes_of(paused.cache)
    assert done_first == [True]
    assert len(drain_events(urgent_events).answer_ids) == 12
    assert one_slot_bench.thread.preempted_count == preempted_before + 1


@pytest.mark.parametrize(
    "name", sample(["gemma3_text", "qwen3_next", "deepseek_v3"], "gemma3_text", "qwen3_next")
)
def test_preemption_in_batches_changes_no_answer_for_any_cache_kind(
    tmp_path: Path, name: str
) -> None:
    """Windows, recurrent states and latents leave a batch and join another one unharmed."""
    bench = Bench(write_model(tmp_path / name, ARCHITECTURES[name]), active_max=2)
    prompts = [prompt_of(count, count) for count in (70, 40, 50, 20)]
    alone = [bench.answer(prompt, GREEDY) for prompt in prompts]
    low = [bench.make(prompt, GREEDY, priority=Priority.BACKGROUND) for prompt in prompts[:2]]
    high = [bench.make(prompt, GREEDY) for prompt in prompts[2:]]
    at_token(low[0][0], 3, lambda: bench.thread.submit(high[0][0]))
    at_token(high[0][0], 4, lambda: bench.thread.submit(high[1][0]))
    for sequence, _ in low:
        bench.thread.submit(sequence)

    assert alone == [drain_events(events).answer_ids for _, events in [*low, *high]]
    bench.thread.stop()
