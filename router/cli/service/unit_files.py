"""Unit files of launchd and systemd, as text."""

import plistlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fabric.hosting.process import OPEN_FILES
from router.cli.errors import MISUSED, CommandError

LAUNCHD: Final = "launchd"
SYSTEMD: Final = "systemd"
KINDS: Final = (LAUNCHD, SYSTEMD)
MARK: Final = "written by `macfabric service install`"
UMASK: Final = 0o077
RESTART_S: Final = 10  # between an end and the next start; a fabric takes as long to start
_RESTART: Final = (
    "Restart=on-failure",
    f"RestartSec={RESTART_S}",
    f"RestartPreventExitStatus={MISUSED}",  # the same arguments would fail again
)
_HEADER_END: Final = b"<plist"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_@+=:,./~-]+")


@dataclass(frozen=True, slots=True)
class Unit:
    """Program that the system starts, and how it ends."""

    role: str
    command: tuple[str, ...]
    folder: Path  # in which it is started
    environment: Mapping[str, str]
    stop_s: float  # that it may take to save everything
    log: Path  # for launchd; systemd has its journal
    stays: bool  # whether the program itself keeps running; `ray start` leaves others behind
    user: str | None = None  # of a unit of the whole system; None: the user's own

    @property
    def name(self) -> str:
        """Name of the unit."""
        return unit_name(self.role)


def unit_name(role: str) -> str:
    """Return the name of a role's unit."""
    return f"macfabric-{role}"


def text_of(unit: Unit, kind: str) -> str:
    """Return the file of a unit; raise CommandError for an argument that no file can hold."""
    for word in (*unit.command, str(unit.folder), *unit.environment.values()):
        if _CONTROL.search(word):
            message = f"{word!r} has a control character, which a unit file cannot hold"
            raise CommandError(message, MISUSED)
    return _launchd_text(unit) if kind == LAUNCHD else _systemd_text(unit)


def is_ours(text: str) -> bool:
    """Return whether a unit file was written by this command."""
    return MARK in text


def _launchd_text(unit: Unit) -> str:
    job: dict[str, Any] = {
        "Label": unit.name,
        "ProgramArguments": list(unit.command),
        "WorkingDirectory": str(unit.folder),
        "EnvironmentVariables": dict(unit.environment),
        "RunAtLoad": True,
        "ThrottleInterval": RESTART_S,
        "ExitTimeOut": round(unit.stop_s),
        "ProcessType": "Interactive",  # no throttling of processor and disk
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "StandardOutPath": str(unit.log),
        "StandardErrorPath": str(unit.log),
        "Umask": UMASK,
    }
    if unit.stays:
        job["KeepAlive"] = {"SuccessfulExit": False}
    else:
        job["AbandonProcessGroup"] = True  # Ray outlives the command that started it
    if unit.user is not None:
        job["UserName"] = unit.user
    head, mark, rest = plistlib.dumps(job, sort_keys=False).partition(_HEADER_END)
    comment = f"<!-- {MARK}; `macfabric service uninstall {unit.role}` removes it -->\n".encode()
    return (head + comment + mark + rest).decode()


def _systemd_text(unit: Unit) -> str:
    command = " ".join(map(_quote_word, unit.command))
    lines = [
        f"# {MARK}; `macfabric service uninstall {unit.role}` removes it",
        "[Unit]",
        f"Description=macfabric {unit.role}",
        # A user's own systemd has no such target.
        *(["Wants=network-online.target", "After=network-online.target"] if unit.user else []),
        "",
        "[Service]",
        *(["Type=exec"] if unit.stays else ["Type=oneshot", "RemainAfterExit=yes"]),
        f"ExecStart={command}",
        f"WorkingDirectory={_percent(str(unit.folder))}",
        *(
            f"Environment={_quote_word(f'{name}={value}')}"
            for name, value in unit.environment.items()
        ),
        *([f"User={unit.user}"] if unit.user is not None else []),
        # The first process saves everything and ends the others.
        "KillMode=mixed",
        f"TimeoutStopSec={round(unit.stop_s)}",
        *(_RESTART if unit.stays else []),
        f"UMask={UMASK:04o}",
        f"LimitNOFILE={OPEN_FILES}",
        "NoNewPrivileges=yes",
        "",
        "[Install]",
        f"WantedBy={'default' if unit.user is None else 'multi-user'}.target",
    ]
    return "\n".join([*lines, ""])


def _quote_word(word: str) -> str:
    """Spell one argument of a command; systemd expands `%` and `$` in quotes as well."""
    if _PLAIN.fullmatch(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{_percent(escaped)}"'


def _percent(text: str) -> str:
    return text.replace("%", "%%")
