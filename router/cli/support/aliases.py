"""Stable aliases in place of the names of agents, tenants, nodes and hosts.

An alias is a keyed digest of the name, so two bundles of one fabric use the same ones, and a
guessed name cannot be verified without the key.
"""

import getpass
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final

from fabric.ids import DEFAULT_TENANT
from router.limits import SUPPORT_NAME_PARTS_MAX

AGENT: Final = "agent"
TENANT: Final = "tenant"
GROUP: Final = "group"  # of agents, as a client calls it
NODE: Final = "node"
HOST: Final = "host"
USER: Final = "user"
# Fields of the API's answers that hold a name, wherever they are.
FIELDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("agent", "forked_from", "replaced_agent"), AGENT),
    "tenant": TENANT,
    "group": GROUP,
    **dict.fromkeys(("node", "owner", "peer", "from", "to", "served_by"), NODE),
    "host": HOST,
}
_ALIAS_BYTES: Final = 5
# Everything that a name may consist of, and what its parts are joined by.
_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@+=~-]*|_[A-Za-z0-9_.-]+")
_JOINT: Final = re.compile(r"([_.:@+=~-]+)")
_IPV4: Final = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_IPV6: Final = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:.])")
_MAC: Final = re.compile(r"(?<![\w:])[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}(?![\w:])")
_KEPT: Final = frozenset({DEFAULT_TENANT, "", "localhost"})


class Aliases:
    """Names that were learnt, and their aliases."""

    def __init__(self, key: bytes, *, keeps_names: bool = False) -> None:
        """Derive aliases with a secret `key`; with `keeps_names`, change nothing."""
        self._key = key
        self._keeps_names = keeps_names
        self._aliases: dict[str, str] = {}
        self._beginnings: set[str] = set()  # first parts of the names
        self._home = str(Path.home())

    @property
    def count(self) -> int:
        """Number of names that have an alias."""
        return len(self._aliases)

    def learn_machine(self) -> None:
        """Learn the names of this machine and of its user."""
        name = socket.gethostname()
        self.learn(HOST, name)
        self.learn(HOST, name.partition(".")[0])
        with suppress(KeyError, OSError):  # an account without a name
            self.learn(USER, getpass.getuser())

    def learn(self, kind: str, name: object) -> None:
        """Give a name an alias, unless it is public: the default tenant, or a local address."""
        if isinstance(name, str) and name not in _KEPT and not _is_public_address(name):
            self._aliases.setdefault(name, self.alias(kind, name))
            self._beginnings.add(_JOINT.split(name, maxsplit=1)[0])

    def learn_from(self, value: Any, fields: Mapping[str, str] = FIELDS) -> None:
        """Learn the names in an answer of the API, by the fields that hold them."""
        if isinstance(value, dict):
            for field, inner in value.items():
                if field in fields:
                    self.learn(fields[field], inner)
                self.learn_from(inner, fields)
        elif isinstance(value, list):
            for inner in value:
                self.learn_from(inner, fields)

    def alias(self, kind: str, name: str) -> str:
        """Return the alias of a name."""
        digest = blake2b(name.encode(), digest_size=_ALIAS_BYTES, key=self._key[:64])
        return f"{kind}-{digest.hexdigest()}"

    def replace(self, value: Any) -> Any:
        """Return an answer of the API with aliases in all its texts."""
        if isinstance(value, dict):
            return {self._replace_key(field): self.replace(inner) for field, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.replace(inner) for inner in value]
        return self.replace_in_text(value) if isinstance(value, str) else value

    def replace_in_text(self, text: str) -> str:
        """Return a text with aliases, and the user's folder as `~`."""
        if self._keeps_names:
            return text
        if self._home not in ("/", ""):
            text = re.sub(rf"{re.escape(self._home)}(?![\w.-])", "~", text)
        text = _MAC.sub(lambda match: self.alias(HOST, match[0].lower()), text)
        for pattern in (_IPV4, _IPV6):
            text = pattern.sub(self._address, text)
        return _WORD.sub(self._word, text)

    def _replace_key(self, field: str) -> str:
        """Replace a key that is a learnt name and cannot be a field's own."""
        if field in FIELDS or self._keeps_names:
            return field
        return self._aliases.get(field, field)

    def _address(self, match: re.Match[str]) -> str:
        try:
            address = ip_address(match[0])
        except ValueError:
            return match[0]
        if _is_public_address(str(address)):
            return match[0]
        return self.alias(HOST, str(address))

    def _word(self, match: re.Match[str]) -> str:
        """Replace the longest learnt names within a word such as `node.NAME.jsonl`."""
        alias = self._aliases.get(match[0])
        if alias is not None:
            return alias
        parts = _JOINT.split(match[0])
        shown, at = [], 0
        while at < len(parts):
            end = self._end_of_name(parts, at) if parts[at] in self._beginnings else at
            shown.append(self._aliases["".join(parts[at:end])] if end > at else parts[at])
            at = max(end, at + 1)
        return "".join(shown)

    def _end_of_name(self, parts: list[str], begin: int) -> int:
        """Return where the longest learnt name that begins here ends; `begin` if there is none."""
        last = min(len(parts), begin + SUPPORT_NAME_PARTS_MAX)
        ends = range(last, begin, -1)
        return next((end for end in ends if "".join(parts[begin:end]) in self._aliases), begin)


def _is_public_address(name: str) -> bool:
    """Return whether a text is an address that every machine has: loopback, any, self-assigned."""
    try:
        address = ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified or address.is_link_local
