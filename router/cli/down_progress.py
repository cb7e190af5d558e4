"""Progress of `macfabric down`: text, or with --json one object per line."""

import json
from collections.abc import Mapping
from typing import Any, Final

from router.cli.output import Steps
from router.cli.terminal import print_error

PROGRESS_S: Final = 1.0  # between two looks at how far the stop is

_TEXTS: Final = {
    "asked": "asking process {pid} to stop; turns get {wait_s:g} s to end",
    "already_stopping": "it is stopping already; waiting for its end (`--wait 0` hurries it)",
    "draining": "waiting for running turns: {turns}, up to {left_s:g} s",
    "saving": "saving what the nodes hold",
    "stopping_ray": "stopping Ray",
}


class DownProgress:
    """Shows each state of a stop once."""

    def __init__(self, steps: Steps, *, as_json: bool) -> None:
        self._steps = steps
        self._as_json = as_json
        self._shown: Mapping[str, Any] = {}

    def note(self, row: Mapping[str, Any]) -> None:
        """Show a state, unless it is the one that was shown last."""
        if not row or row == self._shown:
            return
        self._shown = row
        if self._as_json:
            print_error(json.dumps(row))
            return
        text = _TEXTS.get(str(row.get("event")))
        if text is not None:
            self._steps.say(text.format_map(row))
