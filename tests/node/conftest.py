"""Fixtures of the data plane's tests: blocks in files, and a server over them."""

import pytest

from fabric.hosting.clock import SystemClock
from tests.support.transfers import Shelf, serve, stop_servers


@pytest.fixture
def shelf(tmp_path):
    yield Shelf(tmp_path)
    stop_servers()


@pytest.fixture
def server(shelf):
    return serve(shelf, SystemClock())


@pytest.fixture
def port(server):
    return server.addresses()[0].port
