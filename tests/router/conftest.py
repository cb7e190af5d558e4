"""All tests here run on asyncio, in the same loop as their fixtures."""

import hypothesis
import pytest

from router.policies import foreign_calls

# Other processes on the machine may be slow; that is no failure of an example.
hypothesis.settings.register_profile("router", deadline=None)
hypothesis.settings.load_profile("router")


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def patient_with_policies(monkeypatch):
    """Let an operator's policy take as long as a busy machine needs; tests may set less."""
    monkeypatch.setattr(foreign_calls, "POLICY_S", 60.0)
