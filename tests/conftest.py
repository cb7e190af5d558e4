"""The order of the files: those with slow tests begin, so that none of them begins last."""

import pytest


@pytest.hookimpl(trylast=True)  # only what was not deselected counts
def pytest_collection_modifyitems(items):
    """Put files with slow tests first; two workers then end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
