"""All tests here run on asyncio, in the same loop as their fixtures."""

import hypothesis
import pytest

# Other processes on the machine may be slow; that is no failure of an example.
hypothesis.settings.register_profile("router", deadline=None)
hypothesis.settings.load_profile("router")


@pytest.fixture
def anyio_backend():
    return "asyncio"
