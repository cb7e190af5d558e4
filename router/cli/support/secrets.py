"""Removal of keys and tokens from texts: known ones, and everything that looks like one."""

import base64
import binascii
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from fabric.keys import CLUSTER_KEY, MEMBER_KEY, RAY_TOKEN, http_secret, is_plain
from router.cli.setting_rows import SECRET_NAME
from router.limits import SUPPORT_SECRET_BYTES_MAX, SUPPORT_SECRET_CHARS_MIN

REMOVED: Final = "[removed]"
_PATTERNS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        r"(?i)\b(?:bearer|basic)\s+[\w.~+/=-]{8,}",
        r"(?i)(?<=://)[^\s/@:]+:[^\s/@]+(?=@)",
        r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?",  # a JSON web token
        r"\b(?:sk|pk|rk)[-_][\w-]{12,}",
        r"\b(?:hf|ghp|gho|ghs|github_pat|glpat|xox[abprs])[-_][\w-]{10,}",
        r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        r"(?i)\bsha256:[0-9a-f]{64}\b",
        r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{64,}(?![0-9A-Fa-f])",  # our own keys; removes hashes as well
    )
)
# `api_key=…`, `"token": "…"`: only the value is removed.
_NAMED: Final = re.compile(
    r"(?i)(?P<name>[\w-]*(?:api[_-]?key|access[_-]?key|operator[_-]?key|signing[_-]?key|token"
    r"|secret|password|passwd|authorization|cookie)[\"']?\s*[:=]\s*[\"']?)"
    r"(?P<value>(?!\[removed\])[^\s\"',;}\]]{8,})"
)
_PEM_LINE: Final = re.compile(r"[A-Za-z0-9+/=]{40,}")


class Secrets:
    """Known secrets of this machine's fabric, in all their spellings."""

    def __init__(self) -> None:
        self._spelled: set[str] = set()

    def add(self, value: object) -> None:
        """Remember a secret, unless the text is too short for one."""
        if isinstance(value, str) and len(value.strip()) >= SUPPORT_SECRET_CHARS_MIN:
            self._spelled.update(_spellings(value.strip()))

    def add_files(self, folder: Path, names: tuple[str, ...] = ()) -> None:
        """Remember the keys of a folder: ours, and files of other names."""
        for name in (CLUSTER_KEY, MEMBER_KEY, RAY_TOKEN, *names):
            for text in _texts_of(folder / name):
                self.add(text)
                if name == CLUSTER_KEY and (raw := _from_hex(text)):
                    self.add(http_secret(raw))

    def add_settings(self, keys: Mapping[str, str]) -> None:
        """Remember keys that settings spell out."""
        for key in keys.values():
            if is_plain(key):
                self.add(key)

    def add_environment(self) -> None:
        """Remember the values of variables that are named as secrets."""
        for name, value in os.environ.items():
            if SECRET_NAME.search(name) and not Path(value).exists():
                self.add(value)

    def scrub(self, text: str) -> str:
        """Return a text without secrets."""
        for secret in sorted(self._spelled, key=len, reverse=True):
            text = text.replace(secret, REMOVED)
        for pattern in _PATTERNS:
            text = pattern.sub(REMOVED, text)
        return _NAMED.sub(lambda match: f"{match['name']}{REMOVED}", text)

    def scrub_values(self, value: Any) -> Any:
        """Return plain data without secrets in its texts."""
        if isinstance(value, dict):
            return {
                self.scrub(str(name)): self.scrub_values(inner) for name, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.scrub_values(inner) for inner in value]
        return self.scrub(value) if isinstance(value, str) else value

    def is_in(self, raw: bytes) -> bool:
        """Return whether any known secret is among these bytes."""
        return any(secret.encode() in raw for secret in self._spelled)


def _spellings(secret: str) -> Iterator[str]:
    """Yield the ways in which a secret may be written."""
    yield secret
    yield quote(secret, safe="")
    yield base64.b64encode(secret.encode()).decode().rstrip("=")
    if raw := _from_hex(secret):
        yield secret.upper()
        yield secret.lower()
        yield base64.b64encode(raw).decode().rstrip("=")
        yield base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _from_hex(text: str) -> bytes:
    try:
        return binascii.unhexlify(text.strip())
    except (ValueError, binascii.Error):
        return b""


def _texts_of(path: Path) -> list[str]:
    """Return a key file's text, or the lines of a PEM file's key."""
    try:
        with path.open("rb") as file:
            text = file.read(SUPPORT_SECRET_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return []
    return _PEM_LINE.findall(text) if "PRIVATE KEY" in text else [text.strip()]
