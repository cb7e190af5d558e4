"""The engine thread with a real tiny model: batches, cancels, failures, exact bytes."""

import queue
import random
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from fabric.generation import FinishReason, Sampling
from node.clock import SystemClock
from node.engine_thread import EngineThread
from node.mlx.answer import Answer
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.engine import Engine
from node.mlx.loaded_model import LoadedModel, load_model
from node.mlx.resident_cache import ResidentCache
from node.sequence import Broke, Ended, Produced, Sequence, SequenceEvent
from tests.support.tiny_models import LLAMA, VOCABULARY, write_model


class Bench:
    """An engine thread and what a test needs to feed it."""

    def __init__(self, folder: Path, *, exact_chunks: bool = False) -> None:
        self.thread = EngineThread(
            SystemClock(), active_max=8, waiting_max=32, exact_chunks=exact_chunks
        )

        def build() -> tuple[Engine, LoadedModel]:
            loaded = load_model(str(folder))
            return Engine(loaded.model, loaded.spec), loaded

        self.loaded = self.thread.start(build)
        self.tokenizer = ChatTokenizer(self.loaded.tokenizer)

    def cache(self, capacity_tokens: int = 512) -> ResidentCache:
        """Return an empty cache."""
        return self.thread.call(lambda: self.thread.engine.new_cache(capacity_tokens)).result()

    def submit(
        self, prompt: list[int], sampling: Sampling, cache: ResidentCache | None = None
    ) -> tuple[Sequence, "queue.Queue[SequenceEvent]"]:
        """Queue a sequence and return it with its events."""
        events: queue.Queue[SequenceEvent] = queue.Queue()
        sequence = Sequence(
            cache=cache or self.cache(),
            prompt=prompt,
            sampling=sampling,
            seed=sampling.seed or 0,
            answer=Answer(self.tokenizer, "", sampling.stop, None),
            emit=events.put,
            stop_ids=self.tokenizer.eos_ids,
            token_text=self.tokenizer.token_text,
        )
        self.thread.submit(sequence)
        return sequence, events

    def bytes_of(self, cache: ResidentCache) -> bytes:
        """Return a cache's exact contents."""

        def gather() -> bytes:
            cache.settle()
            return bytes(cache.gather(0, cache.tokens_count))

        return self.thread.call(gather).result()


def wait(events: "queue.Queue[SequenceEvent]") -> Ended | Broke:
    """Drain events up to the last one."""
    while True:
        event = events.get(timeout=60)
        if isinstance(event, (Ended, Broke)):
            return event


def ended(events: "queue.Queue[SequenceEvent]") -> Ended:
    """Drain events of a sequence that must end well."""
    event = wait(events)
    assert isinstance(event, Ended)
    return event


def prompt_of(count: int, seed: int) -> list[int]:
    """Return random ordinary tokens."""
    rng = random.Random(seed)
    return [rng.randrange(10, VOCABULARY) for _ in range(count)]


GREEDY = Sampling(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny llama."""
    return write_model(tmp_path_factory.mktemp("models") / "llama", LLAMA)


@pytest.fixture(scope="module")
def bench(folder: Path) -> Iterator[Bench]:
    """Run one engine thread for the module."""
    made = Bench(folder)
    yield made
    made.thread.stop()


def test_same_tokens_as_mlx_lm_with_its_quantized_cache(bench: Bench) -> None:
    """One sequence decodes what mlx-lm decodes over the same 4-bit cache."""
    prompt = prompt_of(200, 1)

    def oracle() -> list[int]:
        caches = [QuantizedKVCache(64, 4) for _ in bench.loaded.model.layers]
        model, out = bench.loaded.model, []
        model(mx.array([prompt[:-1]]), cache=caches)
        token = mx.array([prompt[-1:]])
        for _ in range(12):
            token = mx.argmax(model(token, cache=caches)[:, -1], axis=-1, keepdims=True)
            out.append(int(token.item()))
        return out

    want = bench.thread.call(oracle).result()
    _, events = bench.submit(prompt, GREEDY)

    assert want == ended(events).answer_ids


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(max_tokens=12, temperature=0.9, top_p=0.9, top_k=40, seed=5, ignore_eos=True),
        Sampling(max_tokens=12, logprobs=3, ignore_eos=True),
        Sampling(max_tokens=12, repetition_penalty=1.3, ignore_eos=True),
    ],
    ids=["greedy", "seeded", "logprobs", "penalty"],
)
def test_batched_equals_alone(bench: Bench, sampling: Sampling) -> None:
    """A sequence's tokens do not depend on who else is in the batch."""
    prompts = [prompt_of(count, count) for count in (150, 3, 40)]
    alone = [ended(bench.submit(prompt, sampling)[1]).answer_ids for prompt in prompts]

    together = [bench.submit(prompt, sampling)[1] for prompt in prompts]

    assert alone == [ended(events).answer_ids for events in together]


def test_cache_holds_prompt_and_answer(bench: Bench) -> None:
    """After the end every emitted token is in the cache."""
    sequence, events = bench.submit(prompt_of(30, 2), GREEDY)
    end = ended(events)

    assert end.reason is FinishReason.LENGTH
    assert sequence.cache.tokens_count == 30 + 12


def test_restored_bytes_decode_bit_equal(bench: Bench) -> None:
    """A cache rebuilt from its bytes continues with identical log probabilities."""
    sampling = Sampling(max_tokens=8, logprobs=5, ignore_eos=True)
    sequence, events = bench.submit(prompt_of(300, 3), GREEDY)
    history = prompt_of(300, 3) + ended(events).answer_ids
    raw = bench.bytes_of(sequence.cache)
    count = sequence.cache.tokens_count
    copy = bench.cache(count)
    at = 0
    for view in copy.scatter_views(0, count):
        view[:] = raw[at : at + len(view)]
        at += len(view)
    del view
    copy.assume(count)
    longer = history + prompt_of(20, 4)

    answers = []
    for cache in (sequence.cache, copy):
        _, events = bench.submit(longer, sampling, cache)
        produced = []
        while not isinstance(event := events.get(timeout=60), Ended):
            if isinstance(event, Produced):
                produced.append(event.logprobs)
        answers.append(produced)

    assert answers[0] == answers[1]
    assert bench.bytes_of(sequence.cache) == bench.bytes_of(copy)


def test_cancel_keeps_cache_and_tokens_in_step(bench: Bench) -> None:
    """A cancelled sequence's cache holds exactly the prompt and the delivered tokens."""
    sampling = Sampling(max_tokens=10_000, ignore_eos=True)
    sequence, events = bench.submit(prompt_of(20, 5), sampling)
    for _ in range(4):
        events.get(timeout=60)
    sequence.cancelled.set()
    bench.thread.wake()
    end = ended(events)

    assert end.reason is None
    assert 20 + len(end.answer_ids) == sequence.cache.tokens_count


def test_one_failure_ends_only_itself(bench: Bench) -> None:
    """A sequence whose cache breaks does not take the batch with it."""
    broken_cache = bench.cache()
    prompts = [prompt_of(40, 6), prompt_of(50, 7)]
    want = ended(bench.submit(prompts[0], GREEDY)[1]).answer_ids
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    good, good_events = bench.submit(prompts[0], sampling)
    bad, bad_events = bench.submit(prompts[1], sampling, broken_cache)
    bad_events.get(timeout=60)  # decoding has begun
    broken_cache.layers[2]._stores[0].arrays = (mx.zeros((1, 2, 3, 1)),) * 3

    assert isinstance(wait(bad_events), Broke)
    assert want == ended(good_events).answer_ids[:12]
    assert good.cache.tokens_count == 40 + 40
    assert bad.slot is not None


def test_exact_chunks_make_warm_bit_equal_to_cold(folder: Path) -> None:
    """On the fixed grid, computing on top of a cut equals computing from the start."""
    bench = Bench(folder, exact_chunks=True)
    prompt = prompt_of(700, 8)
    one = Sampling(max_tokens=1, ignore_eos=True)
    cold, events = bench.submit(prompt, one)
    ended(events)
    warm, events = bench.submit(prompt_of(700, 8)[:600], one)
    ended(events)
    warm.cache.rewind(512)
    again, events = bench.submit(prompt, one, warm.cache)
    ended(events)

    assert bench.bytes_of(cold.cache) == bench.bytes_of(again.cache)
    bench.thread.stop()


def test_stop_string_is_found_across_tokens_and_hidden(bench: Bench) -> None:
    """Decoding ends at a stop string, which the client does not see."""
    prompt = prompt_of(60, 9)
    full = ended(bench.submit(prompt, Sampling(max_tokens=30, ignore_eos=True))[1]).answer_text
    stop = full[len(full) // 2 : len(full) // 2 + 4]
    _, events = bench.submit(prompt, Sampling(max_tokens=30, stop=(stop,), ignore_eos=True))
    seen = ""
    while not isinstance(event := events.get(timeout=60), Ended):
        if isinstance(event, Produced):
            seen += event.shown.text

    assert stop == event.stop_string
    assert full[: full.index(stop)] == seen + event.shown.text
