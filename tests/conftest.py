"""The order of the files: the longest begin, so that none of them begins last."""

import gc
import importlib
import os
import signal
from contextlib import suppress
from functools import cache

import httpcore2
import hypothesis
import pytest

from node.runtime.one_loop import assert_one_loop
from tests.nightly_parts import parts, select

assert_one_loop()
# Other processes may slow the machine down; that is no failure of an example.
hypothesis.settings.register_profile(
    "macfabric", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("macfabric")
# An HTTP client reads the system's certificates, which takes longer than most of its requests.
_read_certificates = httpcore2.default_ssl_context
_certificates_of = cache(lambda _file, **options: _read_certificates(**options))
httpcore2.default_ssl_context = lambda **options: _certificates_of(
    os.environ.get("SSL_CERT_FILE"), **options
)

# nohup and a shell's background jobs have these ignored, by all that the tests start as well.
for number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(
            number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
        )

# By what they take on two idle cores (docs/testing.md), the longest first.
LONGEST = (
    "e2e/test_benchmarks.py",
    "cluster/test_faults.py",
    "node/turn/test_edited_turns.py",
    "sim/test_simulation.py",
    "faults/test_migration_kills.py",
    "node/mlx/test_every_architecture.py",
    "e2e/test_hostile_requests.py",
    "cluster/test_up.py",
    "e2e/test_long_prompts.py",
    "node/test_service.py",
    "node/test_architectures_served.py",
    "node/engine/test_live_handover.py",
    "router/moves/test_migrations.py",
    "faults/test_partitions.py",
    "e2e/test_moves.py",
)


def pytest_addoption(parser):
    """Declare the option by which `make nightly` runs one part of the nightly tests."""
    parser.addoption("--part", choices=parts(), help="run only this part of the nightly tests")


@pytest.hookimpl(trylast=True)  # only what was not deselected counts
def pytest_collection_modifyitems(config, items):
    """Keep the requested part; put the longest files first, then others with slow tests."""
    if part := config.getoption("--part"):
        keep_part(config, items, part)
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item):
        return ranks.get(path_below_tests(item), len(LONGEST)), item.path not in slow

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Pause garbage collection during imports, and exempt what they leave from it."""
    gc.disable()
    try:
        import_share(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def import_share(config):
    """Import this worker's share of the test files first, in a run of all of them.

    Each file is then compiled by one worker, and the others find it compiled.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted(config.rootpath.joinpath("tests").rglob("test_*.py"))[number::count]:
        name = ".".join(path.relative_to(config.rootpath).with_suffix("").parts)
        with suppress(Exception):  # the collection reports it
            importlib.import_module(name)


def keep_part(config, items, part):
    """Deselect every test but the nightly ones of `part`."""
    nightly = [item for item in items if item.get_closest_marker("nightly")]
    chosen = select(map(path_below_tests, nightly), part)
    kept = {item for item, is_chosen in zip(nightly, chosen, strict=True) if is_chosen}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def path_below_tests(item):
    return item.path.relative_to(item.config.rootpath / "tests").as_posix()
