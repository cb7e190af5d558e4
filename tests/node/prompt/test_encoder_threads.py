"""The bytes encoded at once are bounded; small prompts do not wait for large ones."""

import asyncio
import threading

import pytest

from node.limits import ENCODERS, ENCODING_BYTES_MAX
from node.prompt.pipeline import PromptPipeline
from node.prompt.prompt_encoder import EncoderThreads
from tests.support.services import ask, running
from tests.support.tiny_models import LLAMA, write_model


class Work:
    """A job that blocks its thread until released, and counts concurrent ones."""

    def __init__(self):
        self.running = self.most = 0
        self.may_end = threading.Event()
        self._lock = threading.Lock()

    def __call__(self):
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        assert self.may_end.wait(60)
        with self._lock:
            self.running -= 1


async def wait_for_running(work, running):
    async with asyncio.timeout(60):
        while work.running != running:  # noqa: ASYNC110 - it runs on threads
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert work.running == running


def run(scenario):
    encoders = EncoderThreads()
    try:
        asyncio.run(scenario(encoders))
    finally:
        encoders.close()


def test_large_prompts_wait_for_the_byte_budget_and_small_ones_do_not():
    async def scenario(encoders):
        large, small = Work(), Work()
        third = ENCODING_BYTES_MAX // 2 + 1
        tasks = [asyncio.create_task(encoders.run(large, third)) for _ in range(5)]
        await wait_for_running(large, 1)
        one = asyncio.create_task(encoders.run(small, 100))
        await wait_for_running(small, 1)
        small.may_end.set()
        await one
        large.may_end.set()
        await asyncio.gather(*tasks)
        assert large.most == 1

    run(scenario)


def test_prompt_larger_than_the_budget_runs_alone():
    async def scenario(encoders):
        work = Work()
        sizes = [ENCODING_BYTES_MAX * 9, ENCODING_BYTES_MAX // 2]
        tasks = [asyncio.create_task(encoders.run(work, size)) for size in sizes]
        await wait_for_running(work, 1)
        work.may_end.set()
        await asyncio.gather(*tasks)
        assert work.most == 1

    run(scenario)


@pytest.mark.parametrize("ends_first", [False, True])
def test_cancelled_waiter_takes_no_bytes(ends_first):
    async def scenario(encoders):
        work = Work()
        tasks = [asyncio.create_task(encoders.run(work, ENCODING_BYTES_MAX)) for _ in range(4)]
        await wait_for_running(work, 1)
        if ends_first:  # admitted and cancelled at the same moment
            work.may_end.set()
            await tasks[0]
        tasks[1].cancel()
        tasks[2].cancel()
        work.may_end.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(each, asyncio.CancelledError) for each in done) >= 1
        await asyncio.wait_for(encoders.run(lambda: None, ENCODING_BYTES_MAX), 60)
        assert encoders._used_bytes == 0
        assert not encoders._waiting

    run(scenario)


def test_failed_job_releases_its_bytes():
    async def scenario(encoders):
        for _ in range(ENCODERS + 1):
            with pytest.raises(ZeroDivisionError):
                await encoders.run(lambda: 1 / 0, ENCODING_BYTES_MAX)

    run(scenario)


def test_answer_prefix_is_read_off_the_event_loop(tmp_path, monkeypatch):
    """For a moved answer this may be a hundred thousand tokens."""
    threads = []
    begin_answer = PromptPipeline._begin_answer

    def record_thread(*arguments):
        threads.append(threading.current_thread().name)
        return begin_answer(*arguments)

    with running(tmp_path / "a", write_model(tmp_path / "model", LLAMA)) as service:
        monkeypatch.setattr(PromptPipeline, "_begin_answer", record_thread)
        ask(service, "the cat sat on the mat", max_tokens=1)
    assert [name.rpartition("_")[0] for name in threads] == ["encode"]
