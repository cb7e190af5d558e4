"""Progress of an agent's move on standard error, while a command waits for its end."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlencode

from router.cli.events import PATH
from router.cli.output import Steps, human_bytes
from router.cli.terminal import errors_are_terminal
from router.client.client import FabricAgent
from router.client.http_api import ClientError

REPORT_S: Final = 1.0  # between two lines; most moves take less


@contextlib.contextmanager
def move_progress(agent: FabricAgent, *, quiet: bool) -> Iterator[None]:
    """Report what has been sent, once a second, unless `quiet` or without a terminal."""
    ends = threading.Event()
    if not quiet and errors_are_terminal():
        threading.Thread(target=_report, args=(agent, ends), daemon=True).start()
    try:
        yield
    finally:
        ends.set()


def _report(agent: FabricAgent, ends: threading.Event) -> None:
    """Write a line for what has changed since the last one, until the move has ended."""
    steps, last_s = Steps(), time.monotonic()
    query = urlencode({"agent": agent.name, "name": "move.state", "snapshot": "false"})
    # The answer to the move itself reports what went wrong.
    with contextlib.suppress(ClientError):
        for event in agent.fabric.events(f"{PATH}?{query}"):
            if ends.is_set():
                return
            if time.monotonic() - last_s >= REPORT_S:
                last_s = time.monotonic()
                sent, total = (event.data.get(f"bytes_{name}") for name in ("sent", "total"))
                of_total = f" of {human_bytes(total)}" if total else ""
                steps.say(f"{event.data.get('state')}, {human_bytes(sent)}{of_total} sent")
