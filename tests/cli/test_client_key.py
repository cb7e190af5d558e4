"""The client key of `up`: its tenant, its refusals, and its visibility."""

import argparse
import os
from hashlib import sha256

import pytest

from fabric.errors import RejectedError
from fabric.limits import ALLOWED_HOSTS_MAX
from fabric.settings import RouterSettings, parse_settings
from router.cli.client_key import add_key_options, with_client_keys
from router.cli.endpoint import KEY_VARIABLE
from router.cli.errors import CommandError

KEY, OTHER = "a-key-of-many-characters", "another-key-of-many-characters"
DIGEST = "sha256:" + sha256(KEY.encode()).hexdigest()


def keys(*argv, router=None):
    """Return the settings with client keys, and the printed notes."""
    parser, notes = argparse.ArgumentParser(), []
    add_key_options(parser)
    return with_client_keys(
        router or RouterSettings(), parser.parse_args(argv), notes.append
    ), notes


def write(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return f"--api-key-file={path}"


def test_settings_are_unchanged_without_a_client_key(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)

    assert keys() == (RouterSettings(), [])


@pytest.mark.parametrize("text", [KEY, f"{KEY}\n", DIGEST])
def test_key_file_with_one_key_is_for_the_default_tenant(tmp_path, text):
    router, notes = keys(write(tmp_path / "key", text))

    assert (router.api_keys, notes) == ({"default": DIGEST}, [])


def test_key_file_may_name_tenants(tmp_path):
    router, _ = keys(write(tmp_path / "keys.yaml", f"alice: {KEY}\nbob: {OTHER}\n"))

    assert router.api_keys == {"alice": KEY, "bob": OTHER}


def test_key_in_environment_is_used_and_removed(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    router, notes = keys()

    assert router.api_keys == {"default": DIGEST}
    assert KEY_VARIABLE in notes[0]
    assert KEY not in notes[0]
    assert KEY_VARIABLE not in os.environ


def test_key_argument_precedes_environment_with_a_warning(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, OTHER)
    router, notes = keys("--api-key", KEY)

    assert router.api_keys == {"default": DIGEST}
    assert "--api-key-file FILE" in notes[0]
    assert KEY_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        (KEY, 0o644, "others may read it"),
        (f"alice: {KEY}", 0o640, "others may read it"),
        ("short", 0o600, "at least 16 characters"),
        ("", 0o600, "at least 16 characters"),
        (f"- {KEY}", 0o600, "its top level must be a mapping"),
        (f"alice: {KEY}\nbob: {KEY}", 0o600, "this is the key of api_keys.alice, too"),
    ],
)
def test_invalid_key_file_is_refused(tmp_path, text, mode, why):
    with pytest.raises(CommandError, match=why):
        keys(write(tmp_path / "key", text, mode))


def test_invalid_or_conflicting_client_key_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(CommandError, match="no such file"):
        keys(f"--api-key-file={tmp_path / 'none'}")
    with pytest.raises(CommandError, match="--api-key: a key must have at least 16 characters"):
        keys("--api-key", "short")
    with pytest.raises(CommandError, match="has a key for tenant default already"):
        keys("--api-key", KEY, router=RouterSettings(api_keys={"default": OTHER}))
    monkeypatch.setenv(KEY_VARIABLE, "short")
    with pytest.raises(
        CommandError, match=f"{KEY_VARIABLE}: a key must have at least 16 characters"
    ):
        keys()


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("allowed_hosts", ["*"]),
        ("allowed_hosts", ["*.local"]),
        ("allowed_hosts", ["host.docker.internal:8000"]),
        ("allowed_hosts", ["http://studio.local"]),
        ("allowed_hosts", ["Studio.local"]),
        ("allowed_hosts", [""]),
        ("allowed_hosts", [f"h{i}" for i in range(ALLOWED_HOSTS_MAX + 1)]),
        ("cors_origins", ["*"]),
        ("cors_origins", ["null"]),
        ("cors_origins", ["https://*.example"]),
        ("cors_origins", ["https://app.example/"]),
        ("cors_origins", ["https://user@app.example"]),
        ("cors_origins", ["HTTPS://app.example"]),
        ("cors_origins", ["app.example"]),
    ],
)
def test_inexact_hosts_and_origins_are_rejected(setting, names):
    with pytest.raises(RejectedError, match=f"macfabric.router.{setting}"):
        parse_settings({"router": {setting: names}})


def test_exact_hosts_and_origins_are_accepted():
    hosts = ["host.docker.internal", "studio.local", "192.168.1.20", "my_host"]
    origins = ["https://app.example", "http://localhost:3000", "app://obsidian.md", "http://[::1]"]
    router = parse_settings({"router": {"allowed_hosts": hosts, "cors_origins": origins}}).router

    assert router.allowed_hosts == tuple(hosts)
    assert router.cors_origins == tuple(origins)
