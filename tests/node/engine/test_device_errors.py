"""A device error ends all running turns; no wrong result is delivered or stored."""

import asyncio
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import mlx.core as mx
import pytest

from fabric.errors import EngineFailedError
from fabric.turn.generation import CacheTier, Failed, FinishReason, Sampling
from node.engine.decode_step import end
from node.engine.engine_thread import EngineThread
from node.engine.sequence import TrimmedEnd
from node.limits import DEVICE_FAILURES_MAX, DEVICE_FAILURES_WITHIN_S
from node.mlx.device import DeviceError
from node.mlx.loaded_model import load_model
from node.mlx.resident_cache import CacheMark, ResidentCache
from tests.node.fake_engine import FakeClock, FakeEngine, make_sequence
from tests.support.architectures import ARCHITECTURES
from tests.support.device_faults import MESSAGE, failing_device, injecting
from tests.support.services import ask, running
from tests.support.tiny_models import ONE_LAYER, write_model
from tests.support.waiting import wait_until

AGENTS, TURNS, ANSWER_TOKENS = ("anna", "boris", "clara"), 3, 12
ANSWER_TOKENS_LONG = 400
ATTEMPTS_MAX = 40
INJECTIONS, INJECTIONS_NIGHTLY = 12, 500
OPERATIONS_BETWEEN_MAX = 20
HOT_BYTES = 3 << 19  # one agent fits; the memory of the others is read from disk
SERVES_AGAIN_S = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "tiny", ONE_LAYER))


class Node:
    """A node whose device fails on demand."""

    def __init__(self, service, faults):
        self.service, self.faults = service, faults
        self.failures_count = 0
        self.tiers = set()  # that served a turn
        self.slowest_s = 0.0

    def take_turn(self, history, agent):
        """Take a turn, and repeat it while the device fails."""
        partial_texts, failed_s = [], None
        for _ in range(ATTEMPTS_MAX):
            try:
                reply = ask(self.service, history, agent=agent, max_tokens=ANSWER_TOKENS)
                last = reply.events[-1]
            except EngineFailedError as error:
                last = Failed(error.status, error.code, error.message)
            else:
                partial_texts.append(reply.text)
                self.tiers.add(reply.admitted.cache)
            if isinstance(last, Failed):
                assert (last.status, last.code) == (503, "engine_failed")
                self.failures_count += 1
                failed_s = time.monotonic()
                continue
            if failed_s is not None:
                self.slowest_s = max(self.slowest_s, time.monotonic() - failed_s)
            assert all(reply.text.startswith(text) for text in partial_texts), (
                "every delivered text was correct"
            )
            return reply.text
        return pytest.fail(f"{ATTEMPTS_MAX} attempts failed")

    def converse(self, agent):
        """Hold a conversation of several turns; return the answers."""
        history, answers = [], []
        for number in range(TURNS):
            history.append({"role": "user", "content": question(agent, number)})
            answers.append(self.take_turn(history, agent))
            history.append({"role": "assistant", "content": answers[-1]})
        return answers


def question(agent, number):
    return f"{agent} asks for the {number}th time: " + f"what is in box {number} of {agent}? " * 30


@contextmanager
def failing_node(folder, model, *, launch_waits):
    with running(folder, model, exact_chunks=True, hot_bytes=HOT_BYTES) as service:
        thread = service.node.resources.engine
        thread.engine.launch_waits = launch_waits
        with failing_device(thread) as faults:
            yield Node(service, faults)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, model):
    """Return the answers and stored blocks of conversations without errors."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with running(folder, model, exact_chunks=True) as service:
        answers = {agent: Node(service, None).converse(agent) for agent in AGENTS}
    return answers, blocks_in(folder)


def blocks_in(folder):
    return {path.name: path.read_bytes() for path in folder.rglob("blocks/*")}


def converse_all(node):
    with ThreadPoolExecutor(len(AGENTS)) as threads:
        return dict(zip(AGENTS, threads.map(node.converse, AGENTS), strict=True))


@pytest.mark.parametrize("launch_waits", [False, True], ids=["prepared early", "waiting"])
@pytest.mark.parametrize(
    "count", [INJECTIONS, pytest.param(INJECTIONS_NIGHTLY, marks=pytest.mark.nightly)]
)
def test_random_device_errors_change_no_answer_and_no_stored_byte(
    tmp_path, model, undisturbed, launch_waits, count
):
    rng, (answers, blocks) = random.Random(count), undisturbed
    with failing_node(tmp_path, model, launch_waits=launch_waits) as node:
        while node.faults.raised_count < count:
            with injecting([node.faults], rng, count, OPERATIONS_BETWEEN_MAX):
                assert converse_all(node) == answers
    stored = blocks_in(tmp_path)
    assert node.failures_count > 0
    assert CacheTier.DISK in node.tiers
    assert node.slowest_s < SERVES_AGAIN_S
    assert stored
    assert {name for name in stored if stored[name] != blocks.get(name)} == set()


@pytest.fixture
def thread():
    """Run an engine thread on a stopped clock; list the times at which it ends the process."""
    ends, clock = [], FakeClock()
    engine_thread = EngineThread(
        clock,
        active_max=4,
        waiting_max=4,
        exact_chunks=False,
        end_process=lambda: ends.append(clock.now_s),
    )
    engine_thread.start(lambda: (FakeEngine(clock), None))
    yield engine_thread, clock, ends
    engine_thread.stop()


def fail(engine_thread):
    def work():
        raise RuntimeError(MESSAGE)

    with pytest.raises(EngineFailedError):
        engine_thread.call(work).result()


def test_results_computed_before_an_error_are_discarded(thread):
    """This includes results of a turn that ended before another one failed."""
    engine_thread, _, _ = thread
    failures_count = engine_thread.failures_count
    fail(engine_thread)

    with pytest.raises(EngineFailedError):
        asyncio.run(engine_thread.compute(lambda: "saved", failures_count))
    assert (
        asyncio.run(engine_thread.compute(lambda: "saved", engine_thread.failures_count)) == "saved"
    )


def test_other_errors_are_raised_to_their_callers(thread):
    engine_thread, _, ends = thread
    for _ in range(DEVICE_FAILURES_MAX):
        with pytest.raises(ZeroDivisionError):
            engine_thread.call(lambda: 1 // 0).result()

    assert (engine_thread.failures_count, ends) == (0, [])


def test_repeated_errors_within_a_minute_end_the_process(thread):
    engine_thread, clock, ends = thread
    for _ in range(2 * DEVICE_FAILURES_MAX):
        clock.now_s += DEVICE_FAILURES_WITHIN_S
        fail(engine_thread)
    assert ends == []

    for _ in range(DEVICE_FAILURES_MAX):
        fail(engine_thread)
    assert ends[0] == clock.now_s


def test_unrecoverable_device_ends_the_process_at_once(thread):
    engine_thread, _, ends = thread

    def fails():
        raise DeviceError(MESSAGE)

    engine_thread.engine.recover = fails
    fail(engine_thread)

    assert len(ends) == 1


def test_error_raised_while_a_turn_gets_its_cache_ends_all_turns(tmp_path, model, monkeypatch):
    """MLX raises the stored error of a step, which other turns wait for, from any later call."""
    with running(tmp_path, model) as service, ThreadPoolExecutor(1) as threads:
        engine = service.node.resources.engine
        ask(service, question("boris", 0), agent="boris", max_tokens=2)
        long = threads.submit(
            ask, service, question("anna", 0), agent="anna", max_tokens=ANSWER_TOKENS_LONG
        )
        wait_until(lambda: engine.active_count)

        def fails(*_):
            assert engine.active_count, "the other turn decodes"
            raise RuntimeError(MESSAGE)

        monkeypatch.setattr(ResidentCache, "rewind", fails)
        short = ask(service, question("boris", 0), agent="boris", max_tokens=2)

        assert isinstance(long.result().events[-1], Failed)
        assert isinstance(short.events[-1], Failed)
        assert engine.failures_count == 1


def test_error_raised_by_the_state_of_a_trimmed_end_is_the_devices():
    sequence, events = make_sequence(4)
    sequence.trimmed = TrimmedEnd(True, 0)
    for text, count in (("word", 4), ("\n", 5)):
        sequence.trimmed.follow(text, CacheMark(count, ()))

    def fails(_):
        raise RuntimeError(MESSAGE)

    sequence.cache.take_marked = fails
    with pytest.raises(DeviceError):
        end(sequence, FinishReason.STOP)
    assert events == []


def test_sampled_token_outside_the_vocabulary_is_a_device_error(model):
    engine = load_model(model).engine
    slot = engine.start(engine.new_cache(8), [1], Sampling(max_tokens=1), 0)
    engine.launch(engine.prepare([slot]))
    slot.pending = mx.array([engine.limits.vocabulary_size], mx.uint32)

    with pytest.raises(DeviceError, match="does not have"):
        engine.peek(slot)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma4_text", "deepseek_v2"])
def test_nan_during_prefill_is_a_device_error(tmp_path, name):
    """The error is found before a save, even if the turn is cancelled before its first token."""
    folder = write_model(tmp_path / "model", ARCHITECTURES[name])
    engine = load_model(str(folder)).engine
    cache = engine.new_cache(64)
    engine.prefill(cache, list(range(8)))
    embed = embedding(engine.model)
    whole = type(embed).__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(embed), "__call__", lambda *args: nan_in_token(whole(*args), 5))
        with pytest.raises(DeviceError, match="NaN"):
            engine.prefill(cache, list(range(8, 20)))

    assert cache.tokens_count == 8
    engine.prefill(cache, list(range(8, 20)))
    assert cache.tokens_count == 20


def embedding(model):
    found = [module for name, module in model.named_modules() if name.endswith("embed_tokens")]
    return found[0]


def nan_in_token(hidden, index):
    nan = mx.where(mx.arange(hidden.shape[1]) == index, float("nan"), 0.0)
    return hidden + nan[None, :, None].astype(hidden.dtype)
