"""Random turns in every dialect to a real fabric: most are accepted, none has an internal error."""

import secrets

import pytest

from tests.support.local_fabric import OPERATOR_KEY, local_fabric
from tests.support.openapi_cases import ALLOWS_RANDOM_THREADS, TURNS, send_turns
from tests.support.template_shapes import SHAPES, write_shape

pytestmark = ALLOWS_RANDOM_THREADS
KEY = "key-of-a-random-client"
ACCEPTED_MIN = 0.5  # share of accepted turns in each dialect
TOKENS_MAX = 24  # of an answer, for any limit of the request: enough for a call and a format


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    shape = SHAPES["thought_opened"]
    model = write_shape(folder / "model", shape, "full", ["A lamp.", "Look there.", '{"path": 7}'])
    with local_fabric(
        folder, str(model), "only", api_keys={"one": KEY}, tokens_max=TOKENS_MAX
    ) as instance:
        yield instance


def judge(fabric, count, seed):
    report = send_turns(fabric, KEY, OPERATOR_KEY, count, seed)
    report.print_statuses()
    for path in TURNS:
        print(f"{report.accepted(path):6.1%} of {path} accepted")
    print(f"{report.retried:6} sent again, as no node was ready")

    assert not report.wrong, "\n\n".join(f"{k}\n{v}" for k, v in report.wrong.items())
    assert report.count >= count * 0.95
    assert all(report.accepted(path) >= ACCEPTED_MIN for path in TURNS)


def test_random_turns_are_mostly_accepted_and_none_fails(fabric):
    judge(fabric, 60, seed=1)


@pytest.mark.nightly
@pytest.mark.slow
def test_ten_thousand_random_turns_are_mostly_accepted_and_none_fails(fabric):
    seed = secrets.randbits(32)
    print("seed", seed)
    judge(fabric, 10_000, seed)
