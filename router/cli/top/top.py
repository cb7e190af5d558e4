"""`macfabric top`: Macs, agents, moves and events, until q or Ctrl-C.

    events ──┐
             ├─▶ news ─▶ FleetState ─▶ figures ─▶ a screen, or a line of JSON
    polls  ──┘

A thread follows the event stream, another reads at a bounded rate what no event reports: the
figures of nodes, and the sizes and tiers of the agents that are shown.
"""

import argparse
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from router.cli.endpoint import add_fabric_options, fabric_of
from router.cli.errors import MISUSED, CommandError
from router.cli.events import PATH
from router.cli.terminal import (
    LiveScreen,
    output_is_utf8,
    print_json,
    print_line,
    screen_is_possible,
    terminal_columns,
)
from router.cli.top.fleet_state import SNAPSHOT, AgentName, FleetState, Row
from router.cli.top.report import AGENTS_IN_A_PIPE, Line, figures, screen_lines
from router.client.client import Fabric
from router.client.http_api import ClientError, RefusedError
from router.limits import (
    TOP_INTERVAL_S_MAX,
    TOP_INTERVAL_S_MIN,
    TOP_NEWS_MAX,
    TOP_READS_MAX,
)

_USUAL_INTERVAL_S: Final = 2.0
_REDRAW_S: Final = 0.25
_RECONNECT_S: Final = 1.0
_NOT_FOUND: Final = 404

News: TypeAlias = Callable[[FleetState], None]


def add_top(commands: Any) -> None:
    """Declare the command."""
    top = commands.add_parser(
        "top",
        description="Show the Macs with their load, the agents used last with the times of their "
        "last turns, moves under way and recent events, until q or Ctrl-C. Without a terminal, or "
        "with --once, print one snapshot and end; with --json, one JSON object per line and "
        "interval.",
    )
    top.add_argument(
        "--interval",
        type=float,
        default=_USUAL_INTERVAL_S,
        metavar="S",
        help=f"seconds between two polls, at least {TOP_INTERVAL_S_MIN:g} (default: %(default)g)",
    )
    top.add_argument("--once", action="store_true", help="print one snapshot and end")
    add_fabric_options(top)
    top.set_defaults(run=run_top)


def run_top(arguments: argparse.Namespace) -> int:
    """Show the fabric until q or Ctrl-C; raise ClientError if it does not answer at first."""
    if not TOP_INTERVAL_S_MIN <= arguments.interval <= TOP_INTERVAL_S_MAX:
        message = f"--interval must be {TOP_INTERVAL_S_MIN:g} to {TOP_INTERVAL_S_MAX:g} seconds"
        raise CommandError(message, MISUSED)
    fabric = fabric_of(arguments)
    watch = FleetWatch(fabric, arguments.interval)
    is_followed = not arguments.once and (arguments.json or screen_is_possible())
    try:
        watch.start()
        if is_followed:
            watch.follow()
        if arguments.json:
            _print_objects(watch, arguments.interval, once=arguments.once)
        elif is_followed:
            _show_screen(watch)
        else:
            _print_snapshot(watch)
    except KeyboardInterrupt:
        pass
    finally:
        watch.stop()
    return 0


def _print_objects(watch: "FleetWatch", interval_s: float, *, once: bool) -> None:
    while True:
        print_json(watch.figures(AGENTS_IN_A_PIPE), indent=None, flush=True)
        if once:
            return
        watch.take_news(interval_s)


def _print_snapshot(watch: "FleetWatch") -> None:
    shown = watch.figures(AGENTS_IN_A_PIPE)
    # A program, or a file, takes lines of any length.
    columns = terminal_columns() if screen_is_possible() else 1_000
    for line in screen_lines(shown, columns, None, is_utf8=output_is_utf8()):
        print_line(line.text)


def _show_screen(watch: "FleetWatch") -> None:
    with LiveScreen() as screen:
        while True:
            columns, rows = screen.size()
            lines = screen_lines(watch.figures(rows), columns, rows, is_utf8=output_is_utf8())
            if watch.problem:
                lines[1:2] = [Line(watch.problem, "red")]
            screen.show([(line.text, line.style) for line in lines])
            if screen.key(_REDRAW_S) in ("q", "Q"):
                return
            watch.take_news(0.0)


@dataclass(slots=True)
class FleetWatch:
    """A fabric's state, kept up to date by two threads."""

    fabric: Fabric
    interval_s: float
    state: FleetState = field(default_factory=FleetState)
    problem: str = ""  # why nothing new arrives
    _news: "queue.Queue[News]" = field(default_factory=lambda: queue.Queue(TOP_NEWS_MAX))
    _ends: threading.Event = field(default_factory=threading.Event)
    _shown: tuple[AgentName, ...] = ()  # agents that polls read again

    def start(self) -> None:
        """Take a first snapshot, with the last turns of the agents in it."""
        for event in self.fabric.events(PATH):
            self.state.take(event)
            break
        self._shown = tuple(self.state.last_used(AGENTS_IN_A_PIPE))
        for name in self._shown:
            self._read_turn(name)(self.state)

    def follow(self) -> None:
        """Keep the state up to date from now on."""
        for run in (self._follow, self._poll):
            threading.Thread(target=run, daemon=True).start()

    def stop(self) -> None:
        """Let the threads end; they are not waited for, as they may wait for the fabric."""
        self._ends.set()

    def figures(self, agents: int) -> Row:
        """Return the state as plain data, with the `agents` used last."""
        self._shown = tuple(self.state.last_used(agents))
        return figures(self.state, self.fabric.url, time.time(), agents)  # noqa: TID251 - shown

    def take_news(self, wait_s: float) -> None:
        """Take everything that has arrived, and what arrives within `wait_s`."""
        end_s = time.monotonic() + wait_s
        while True:
            try:
                left_s = end_s - time.monotonic()
                news = self._news.get(left_s > 0, max(left_s, 0.0))
            except queue.Empty:
                return
            news(self.state)

    def _put(self, news: News) -> None:
        """Hand news to the drawing thread; wait where it has fallen behind."""
        while not self._ends.is_set():
            try:
                self._news.put(news, timeout=_RECONNECT_S)
            except queue.Full:
                continue
            return

    def _follow(self) -> None:
        """Follow the event stream, and begin again with a snapshot where it breaks off."""
        while not self._ends.is_set():
            try:
                for event in self.fabric.events(PATH):
                    if event.name == SNAPSHOT:
                        self.problem = ""
                    self._put(partial(FleetState.take, event=event))
                    if self._ends.is_set():
                        return
                self.problem = "the router has stopped; waiting for it"
            except ClientError as error:
                self.problem = f"{error} Trying again."
            self._ends.wait(_RECONNECT_S)

    def _poll(self) -> None:
        """Read nodes and some of the shown agents at each interval."""
        while not self._ends.wait(self.interval_s):
            try:
                rows = self.fabric.nodes()
                self._put(partial(FleetState.take_nodes, rows=rows))
                for name in self._to_read():
                    self._put(self._read_agent(name))
                    if name not in self.state.turns:
                        self._put(self._read_turn(name))
            except ClientError:
                continue  # the follower reports it

    def _to_read(self) -> tuple[AgentName, ...]:
        """Return shown agents to read again: those outdated by events first, then in turn."""
        shown, stale = self._shown, self.state.stale.copy()
        at = int(time.monotonic() / self.interval_s) * TOP_READS_MAX % max(1, len(shown))
        in_turn = shown[at:] + shown[:at]
        return tuple(sorted(in_turn, key=lambda name: name not in stale)[:TOP_READS_MAX])

    def _read_agent(self, name: AgentName) -> News:
        tenant, agent = name
        try:
            row: Row | None = self.fabric.agent(agent).show(tenant)
        except RefusedError as error:
            if error.status != _NOT_FOUND:
                raise
            row = None
        return lambda state: state.take_agent(name, row)

    def _read_turn(self, name: AgentName) -> News:
        tenant, agent = name
        try:
            turns = self.fabric.agent(agent).turns(tenant, 1)
        except RefusedError:  # gone, or of a version without histories
            turns = []
        return lambda state: state.take_turn(name, turns[0] if turns else None)
