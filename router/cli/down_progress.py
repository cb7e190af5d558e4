"""Progress of `macfabric down`: text, or with --json one object per line."""

import json
from collections.abc import Mapping
from string import Formatter
from typing import Any, Final

from router.cli.output import Steps
from router.cli.terminal import print_error

PROGRESS_S: Final = 1.0  # between two reads of the progress

_TEXTS: Final = {
    "asked": "asking process {pid} to stop; turns get {wait_s:g} s to end",
    "already_stopping": "already stopping; waiting for its end (`--wait 0` hurries it)",
    "draining": "waiting for running turns: {turns}, up to {left_s:g} s",
    "saving": "stopping the nodes; agents in memory are saved first",
    "stopping_ray": "stopping Ray",
}


class DownProgress:
    """Printer of each state of a stop, with `host` for another machine."""

    def __init__(self, steps: Steps, *, as_json: bool, host: str = "") -> None:
        self._steps = steps
        self._as_json = as_json
        self._host = host
        self._shown: Mapping[str, Any] = {}

    def note(self, row: Mapping[str, Any]) -> None:
        """Show a state, unless it is the one that was shown last."""
        if not row or row == self._shown:
            return
        self._shown = row
        if self._as_json:
            print_error(json.dumps({"host": self._host, **row} if self._host else row))
            return
        text = _TEXTS.get(str(row.get("event")))
        if text is not None:
            lead = f"{self._host}: " if self._host else ""
            self._steps.say(lead + text.format_map(row))

    def relay(self, line: str) -> bool:
        """Show a line that `down --json` printed elsewhere; return whether it is progress."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return False
        event = row.get("event") if isinstance(row, dict) else None
        text = _TEXTS.get(event) if isinstance(event, str) else None
        if text is not None:
            names = [name for _, name, _, _ in Formatter().parse(text) if name]
            if all(type(row.get(name)) in (int, float) for name in names):
                self.note({"event": event, **{name: row[name] for name in names}})
        return True
