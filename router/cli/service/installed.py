"""Units that are installed on this machine: where they lie, and how they are loaded and ended."""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from router.cli.errors import CommandError, describe_os_error
from router.cli.service.unit_files import KINDS, LAUNCHD, SYSTEMD, is_ours, unit_name
from router.limits import SERVICE_COMMAND_S_MAX, UNIT_FILE_BYTES_MAX

ROLES: Final = {
    "up": "a whole fabric on this machine",
    "serve": "the router, and a node per Mac, on an existing Ray cluster",
    "ray": "Ray on one Mac of a cluster file, on the head with the router",
    "router": "a second router",
    "voter": "a third vote for two routers",
}
_SYSTEM_FOLDERS: Final = {
    LAUNCHD: Path("/Library/LaunchDaemons"),
    SYSTEMD: Path("/etc/systemd/system"),
}
_USER_FOLDERS: Final = {LAUNCHD: "Library/LaunchAgents", SYSTEMD: ".config/systemd/user"}
_ENDINGS: Final = {LAUNCHD: ".plist", SYSTEMD: ".service"}


@dataclass(frozen=True, slots=True)
class UnitFile:
    """Where a role's unit lies, and the commands that load and end it."""

    kind: str
    role: str
    is_system: bool

    @property
    def path(self) -> Path:
        """Path of the file."""
        folder = (
            _SYSTEM_FOLDERS[self.kind] if self.is_system else Path.home() / _USER_FOLDERS[self.kind]
        )
        return folder / f"{unit_name(self.role)}{_ENDINGS[self.kind]}"

    @property
    def start_commands(self) -> list[list[str]]:
        """Commands that load the unit and start it, now and later."""
        if self.kind == LAUNCHD:
            return [["launchctl", "bootstrap", self._domain, str(self.path)]]
        name = self.path.name
        return [[*self._systemctl, "daemon-reload"], [*self._systemctl, "enable", "--now", name]]

    @property
    def stop_commands(self) -> list[list[str]]:
        """Commands that stop the unit and unload it."""
        if self.kind == LAUNCHD:
            return [["launchctl", "bootout", f"{self._domain}/{unit_name(self.role)}"]]
        return [[*self._systemctl, "disable", "--now", self.path.name]]

    def read(self) -> str | None:
        """Return the file's text, or None if there is none."""
        try:
            with self.path.open("rb") as file:
                return file.read(UNIT_FILE_BYTES_MAX).decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CommandError(describe_os_error(error, self.path)) from None

    @property
    def _domain(self) -> str:
        return "system" if self.is_system else f"gui/{os.getuid()}"

    @property
    def _systemctl(self) -> list[str]:
        return ["systemctl", "--system" if self.is_system else "--user"]


def installed_units(kinds: Sequence[str] = KINDS) -> list[UnitFile]:
    """List the units that this command has written on this machine."""
    files = [
        UnitFile(kind, role, is_system)
        for kind in kinds
        for is_system in (False, True)
        for role in ROLES
    ]
    return [file for file in files if is_ours(file.read() or "")]


def remove_unit(file: UnitFile) -> None:
    """Stop a unit, which may not be loaded, and remove its file; raise CommandError."""
    run_commands(file.stop_commands, may_fail=True)
    try:
        file.path.unlink()
    except OSError as error:
        raise CommandError(describe_os_error(error, file.path)) from None


def run_commands(commands: Sequence[Sequence[str]], *, may_fail: bool = False) -> None:
    """Run commands; raise CommandError for one that fails, unless it may."""
    for command in commands:
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                timeout=SERVICE_COMMAND_S_MAX,
            )
            why = done.stderr.strip() if done.returncode else ""
            failed = done.returncode != 0
        except (OSError, subprocess.TimeoutExpired) as error:
            why, failed = str(error), True
        if failed and not may_fail:
            message = (
                f"`{' '.join(command)}` failed: {why or 'no reason given'}. The file is written; "
                "run the command yourself"
            )
            raise CommandError(message)
