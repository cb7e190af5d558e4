"""Both orders of an engine's step."""

import pytest


@pytest.fixture(params=[False, True], ids=["launch last", "launch first"])
def order(request, bench):
    """Launch the next step before the host reads the last one's tokens, or after it."""
    engine = bench.thread.call(lambda: bench.thread.engine).result()
    engine.launch_waits, before = not request.param, engine.launch_waits
    yield
    engine.launch_waits = before
