"""Checks that a fabric's keys are valid, private and not about to expire."""

import stat
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from fabric.keys.key_files import CLUSTER_KEY, MADE_KEYS, MEMBER_KEY, RAY_TOKEN, SHIPPED_KEYS
from router.cli.doctor.finding import Check
from router.cli.keys.key_folder import AUTHORITY_KEY, KeyFolder
from router.tls.authority import RENEW_BEFORE, Subject, expires_at

_NOBODY = Subject(frozenset(), frozenset())


def key_checks(data: Path, now: datetime) -> Iterator[Check]:
    """Yield the checks of every key folder on this machine."""
    made, shipped = Path(MADE_KEYS).expanduser(), Path(SHIPPED_KEYS).expanduser()
    folders = [KeyFolder.in_data(data), KeyFolder(made, made.parent / AUTHORITY_KEY)]
    for keys in (*folders, KeyFolder(shipped, shipped / AUTHORITY_KEY)):
        if keys.certificate.exists():
            yield _check(keys, now)


def _check(keys: KeyFolder, now: datetime) -> Check:
    name = f"keys in {keys.path}"
    secret = [keys.path / file for file in (CLUSTER_KEY, MEMBER_KEY, RAY_TOKEN)]
    for path in (*secret, keys.authority_key):
        if path.exists() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return Check(name, "error", f"{path} can be read by others; run `chmod 600` on it")
    why = keys.why_renew(_NOBODY, now)
    if why is None:
        ends = expires_at(keys.certificate.read_bytes())
        return Check(name, "ok", f"the certificate is valid until {ends:%Y-%m-%d}")
    # A certificate that ends soon still works; one that has ended or does not match does not.
    still_serves = keys.why_renew(_NOBODY, now - RENEW_BEFORE) is None
    remedy = "`macfabric certs rotate` replaces it; `macfabric up` does so by itself"
    return Check(name, "warning" if still_serves else "error", f"{why}; {remedy}")
