"""The doctor tells of keys that end soon, do not fit together, or are open to others."""

from datetime import UTC, datetime, timedelta

import pytest

from router.cli.doctor.doctor import key_checks
from router.tls.authority import MEMBER_VALID
from tests.support.keys import make_keys

NOW = datetime.now(UTC)


@pytest.fixture
def keys(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return make_keys(tmp_path / "data")


def verdict(keys, now=NOW):
    (check,) = key_checks(keys.path, now)
    return check.verdict, check.detail


def test_sound_keys_are_ok(keys):
    said, detail = verdict(keys)

    assert said == "ok"
    assert str((NOW + MEMBER_VALID).year) in detail


@pytest.mark.parametrize(
    ("before_the_end", "said"),
    [(31, "ok"), (29, "warning"), (1, "warning"), (-1, "error")],
)
def test_an_end_is_told_a_month_ahead(keys, before_the_end, said):
    assert verdict(keys, NOW + MEMBER_VALID - timedelta(days=before_the_end))[0] == said


@pytest.mark.parametrize("name", ["cluster.key", "member.key", "authority.key"])
def test_keys_open_to_others_are_wrong(keys, name):
    (keys.path / name).chmod(0o644)
    said, detail = verdict(keys)

    assert said == "error"
    assert name in detail


def test_a_certificate_without_its_key_is_wrong(keys):
    (keys.path / "member.key").unlink()

    assert verdict(keys)[0] == "error"


def test_where_there_are_no_keys_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    assert list(key_checks(tmp_path, NOW)) == []
