"""All tests here run on asyncio, in the same loop as their fixtures."""

import pytest

from router.policies import foreign_calls


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def patient_with_policies(monkeypatch):
    """Extend the time limit of policies for busy machines; tests may set less."""
    monkeypatch.setattr(foreign_calls, "POLICY_S", 60.0)
