"""Random requests of every route to a real fabric: every answer is documented."""

import secrets

import httpx2
import pytest

from tests.support.local_fabric import OPERATOR_KEY, local_fabric
from tests.support.openapi_cases import ALLOWS_RANDOM_THREADS, OPEN, operations, send_cases

pytestmark = ALLOWS_RANDOM_THREADS
KEY = "key-of-a-random-client"
TOKENS_MAX = 4  # of an answer, for any limit of the request


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    with local_fabric(
        folder, "recall", "left", "right", api_keys={"one": KEY}, tokens_max=TOKENS_MAX
    ) as instance:
        yield instance


def judge(fabric, count, seed):
    report = send_cases(fabric, KEY, OPERATOR_KEY, count, seed)
    report.print_statuses()

    assert not report.wrong, "\n\n".join(f"{k}\n{v}" for k, v in report.wrong.items())
    assert report.count >= count * 0.9
    routes_sent = {(method, path) for method, path, _ in report.statuses}
    assert len(routes_sent) >= len(operations())


def test_random_requests_are_answered_as_documented(fabric):
    judge(fabric, 50, seed=1)


@pytest.mark.nightly
@pytest.mark.slow
def test_ten_thousand_random_requests_are_answered_as_documented(fabric):
    seed = secrets.randbits(32)
    print("seed", seed)
    judge(fabric, 10_000, seed)


def test_every_route_except_health_refuses_a_wrong_key(fabric):
    for operation in operations():
        path = operation.path
        for name in ("agent", "node", "model", "response", "run"):
            path = path.replace(f"{{{name}}}", "left")
        answer = httpx2.request(
            operation.method, fabric.url + path, headers={"authorization": "Bearer wrong"}
        )
        allowed = {200, 503} if operation.path in OPEN else {401}

        assert {answer.status_code} <= allowed, (operation.path, answer.status_code)
