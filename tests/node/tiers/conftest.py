"""Fixtures of full disks: a tiny model, and the size of its agents on disk."""

import pytest

from tests.support.small_node import SMALL, agent_bytes_in
from tests.support.tiny_models import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "small", SMALL))


@pytest.fixture(scope="module")
def agent_bytes(model, tmp_path_factory):
    return agent_bytes_in(tmp_path_factory.mktemp("measure"), model)
