"""What tests of full disks share: a tiny model, and how much of the disk an agent of it takes."""

import pytest

from tests.support.little_room import SMALL, agent_bytes_in
from tests.support.tiny_models import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "small", SMALL))


@pytest.fixture(scope="module")
def agent_bytes(model, tmp_path_factory):
    return agent_bytes_in(tmp_path_factory.mktemp("measure"), model)
