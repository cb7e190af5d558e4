"""Fixtures of the data plane's tests: blocks in files, and a server over them."""

import pytest

from node.clock import SystemClock
from tests.support.transfers import Shelf, serve


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path)


@pytest.fixture
def server(shelf):
    server = serve(shelf, SystemClock())
    yield server
    server.stop()


@pytest.fixture
def port(server):
    return server.addresses()[0].port
