"""The order of the files: the longest begin, so that none of them begins last."""

import pytest

from node.runtime.one_loop import assert_one_loop

assert_one_loop()

# By what they take on two idle cores (docs/testing.md), the longest first.
LONGEST = (
    "cluster/test_faults.py",
    "node/turn/test_edited_turns.py",
    "sim/test_simulation.py",
    "e2e/test_preemption.py",
    "faults/test_migration_kills.py",
    "cluster/test_launch.py",
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


@pytest.hookimpl(trylast=True)  # only what was not deselected counts
def pytest_collection_modifyitems(items):
    """Put the longest files first, then others with slow tests; workers then end together."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}

    def place(item):
        name = item.path.relative_to(item.config.rootpath / "tests").as_posix()
        return ranks.get(name, len(LONGEST)), item.path not in slow

    items.sort(key=place)
