"""A step writes its rows in place: no cache is copied for one more token."""

from benchmarks.append import hurry, measure, prepare


def test_steps_prepared_early_copy_no_cache():
    assert measure(prepare, agents=2, tokens=512, steps=6)["copied MiB"] == 0


def test_step_launched_during_a_read_copies_the_cache():
    """Show that `measure` detects copies; on a busy machine, steps may not overlap."""
    runs = (measure(hurry, agents=2, tokens=512, steps=6)["copied MiB"] for _ in range(5))
    assert any(copied > 0 for copied in runs)
