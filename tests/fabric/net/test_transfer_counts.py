"""Transfer counters have a fixed list of names."""

from fabric.net.wire import FETCHING, OTHER, SENDING, limit_names


def test_unknown_counter_names_are_summed_under_one():
    counts = {"bytes": 7, "refused_bad_key": 2} | {f"refused_made_up_{i}": 1 for i in range(9)}

    assert limit_names(counts, SENDING) == {"bytes": 7, "refused_bad_key": 2, OTHER: 9}
    assert limit_names({"dialled": 1}, FETCHING) == {"dialled": 1}
