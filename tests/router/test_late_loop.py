"""A late event loop drops no connection whose request arrived in time."""

import time

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tests.router.test_http_guard import FEW, OK, SERVERS, answer_of, head, served

LATE_S = 0.3  # longer than the time limit of unauthenticated clients, in each round


async def block_the_loop(_request):
    time.sleep(LATE_S)  # noqa: ASYNC251 - the loop is to be late
    return PlainTextResponse("late")


@pytest.mark.parametrize("config", SERVERS)
def test_requests_received_in_time_are_answered_by_late_loop(config):
    with served(config, FEW, [Route("/late", block_the_loop)]) as server:
        server.connect(12 * head("/late", "GET"))  # one at a time, each in a round of the loop
        asking = []
        for _ in range(3):
            asking += [server.connect(head("/known", "GET", "x-owner: a")) for _ in range(7)]
            time.sleep(LATE_S)
        for sock in asking:
            assert answer_of(sock).startswith(OK)
