"""The doctor reports keys that expire soon, do not match, or are readable by others."""

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


def test_valid_keys_are_ok(keys):
    level, detail = verdict(keys)

    assert level == "ok"
    assert str((NOW + MEMBER_VALID).year) in detail


@pytest.mark.parametrize(
    ("before_the_end", "expected"),
    [(31, "ok"), (29, "warning"), (1, "warning"), (-1, "error")],
)
def test_expiring_certificate_is_warned_about_a_month_ahead(keys, before_the_end, expected):
    assert verdict(keys, NOW + MEMBER_VALID - timedelta(days=before_the_end))[0] == expected


@pytest.mark.parametrize("name", ["cluster.key", "member.key", "authority.key"])
def test_keys_readable_by_others_are_an_error(keys, name):
    (keys.path / name).chmod(0o644)
    level, detail = verdict(keys)

    assert level == "error"
    assert name in detail


def test_certificate_without_its_key_is_an_error(keys):
    (keys.path / "member.key").unlink()

    assert verdict(keys)[0] == "error"


def test_absent_keys_have_no_findings(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))

    assert list(key_checks(tmp_path, NOW)) == []
