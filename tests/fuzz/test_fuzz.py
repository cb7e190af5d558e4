"""Every parser returns or raises its documented error for any input.

Inputs follow from (target, shard, index), so a failure names everything needed to repeat it.
`make fuzz`, or `pytest -m nightly tests/fuzz`, tries a million inputs for every target.
"""

import random
import resource
import signal
import tracemalloc
from contextlib import contextmanager

import pytest

from tests.fuzz.targets import TARGETS, Target

INPUTS = 2_000  # of each target in every run of the tests
NIGHTLY_INPUTS, SHARDS = 1_000_000, 10
WEIGHED = 200  # inputs whose memory is measured, which is slow
BYTES_PER_INPUT_BYTE_MAX = 64
HANG_S = 60  # of CPU time, for a batch that takes a fraction of a second
BATCH = 1_000


@contextmanager
def no_hang():
    """Fail if a batch of inputs takes far too long; this measures nothing."""

    def expire(*_):
        message = f"a batch of {BATCH} inputs took over {HANG_S} s of CPU time"
        raise AssertionError(message)

    before = signal.signal(signal.SIGVTALRM, expire)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def accepts(target: Target, raw: bytes, where: str) -> bool:
    """Parse one input; return whether it was accepted."""
    try:
        target.parse(raw)
    except target.raises:
        return False
    except BaseException as error:
        message = f"{where}: {type(error).__name__}: {error}; the input is {raw.hex()}"
        raise AssertionError(message) from error
    return True


def run(name: str, shard: int, count: int) -> int:
    """Try `count` inputs; return the number accepted."""
    target, rng, accepted = TARGETS[name], random.Random(f"{name} {shard}"), 0
    for start in range(0, count, BATCH):
        with no_hang():
            for index in range(start, min(count, start + BATCH)):
                raw = target.hostile(rng)
                accepted += accepts(target, raw, f"{name}, shard {shard}, input {index}")
    return accepted


@pytest.mark.parametrize("name", TARGETS)
def test_valid_inputs_are_accepted(name):
    """Mutants of rejected inputs would test nothing."""
    for seed in TARGETS[name].seeds:
        assert accepts(TARGETS[name], seed, name)


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_inputs_raise_documented_errors_only(name):
    """Most are refused; some must be accepted, or all mutants would fail at the first check."""
    accepted = run(name, 0, INPUTS)
    assert 0 < accepted < INPUTS * 0.6


@pytest.mark.parametrize("name", TARGETS)
def test_memory_is_bounded_by_the_input(name):
    target, rng = TARGETS[name], random.Random(f"{name} memory")
    accepts(target, target.seeds[0], name)  # caches fill once
    inputs = [target.hostile(rng) for _ in range(WEIGHED)]
    tracemalloc.start()
    try:
        for index, raw in enumerate(inputs):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            accepts(target, raw, f"{name}, input {index}")
            _, peak = tracemalloc.get_traced_memory()
            allowed = target.allocated_bytes_max + BYTES_PER_INPUT_BYTE_MAX * len(raw)
            assert peak - before < allowed, raw.hex()
    finally:
        tracemalloc.stop()


PLANTED_SHARDS = 12
PLANTED = {
    "safetensors header": ("fabric.kvcache.safetensors_header._are_integers", lambda value: True),
    "block header": ("fabric.kvcache.block_file.parse_block_hash", lambda raw: raw),
    "manifest": ("fabric.record.manifest._pieces_problem", lambda manifest: None),
    "cache spec": ("fabric.record.spec_file._is_slot", lambda slot: True),
    "wire frame": ("fabric.net.wire._require", lambda holds, what: None),
    "settings": ("fabric.settings_reader._read_scalar", lambda kind, value, name: value),
}


@pytest.mark.parametrize("name", PLANTED)
def test_fuzzer_finds_planted_faults(name, monkeypatch):
    """A parser without one of its checks fails within as many inputs."""
    monkeypatch.setattr(*PLANTED[name])
    with pytest.raises(AssertionError, match="the input is"):
        _run_until_found(name)


def _run_until_found(name):
    for shard in range(PLANTED_SHARDS):  # most faults are found in the first
        run(name, shard, INPUTS)


@pytest.mark.nightly
@pytest.mark.parametrize("shard", range(1, SHARDS + 1))
@pytest.mark.parametrize("name", TARGETS)
def test_million_hostile_inputs(name, shard):
    before_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    accepted = run(name, shard, NIGHTLY_INPUTS // SHARDS)
    took_s = resource.getrusage(resource.RUSAGE_SELF).ru_utime - before_s
    count = NIGHTLY_INPUTS // SHARDS
    print(f"{name}, shard {shard}: {count:,} inputs, {accepted:,} accepted, {took_s:.0f} s CPU")
    assert 0 < accepted < count
