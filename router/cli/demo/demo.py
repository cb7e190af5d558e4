"""`macfabric demo`: agents that remember, through a restart, a move and a killed node.

Starts a fabric of its own with `macfabric up`, uses it as any client would, and checks every
answer and every reported cache state.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.cli.data_folder import DEMO_PREFIX, DataFolder
from router.cli.demo.demo_client import (
    Conversation,
    DemoTurn,
    Pulse,
    Speaker,
    nodes_by_name,
    wait_for_restart,
)
from router.cli.demo.demo_script import MODEL, make_agents
from router.cli.demo.demo_table import (
    COLD,
    DISK,
    HOT,
    KILLED,
    MEANING,
    PEER,
    STATES,
    as_record,
    problem_of,
    ratios,
    show,
)
from router.cli.errors import FAILED, CommandError
from router.cli.output import Steps
from router.cli.terminal import print_json, print_line
from router.cli.up import catch_signals
from router.client.client import Fabric
from router.supervise.keeper import Keeper
from router.supervise.processes import ProcessId, is_alive
from router.supervise.ray_processes import read_log

NODES = 3
UP = "up"
START_TIMEOUT_S = 120.0
RESTART_TIMEOUT_S = 45.0
STOP_GRACE_S = 45.0


def add_demo(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "demo",
        description="Start three nodes in a temporary folder, let four agents learn facts, and "
        "ask for them again hot, after every node was killed, after a move, and from a node "
        "killed a moment ago. Exit status 0 only if every answer and every cache state is true.",
    )
    parser.add_argument(
        "--model", default=MODEL, metavar="PATH", help="model (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.set_defaults(run=run_demo)


def run_demo(arguments: argparse.Namespace) -> int:
    """Run the demo; return 1 if any answer or cache state is wrong."""
    steps, ends = Steps(), catch_signals()
    # Not $TMPDIR: on macOS its path is too long for Ray's sockets.
    parent = "/tmp" if os.access("/tmp", os.W_OK) else None  # noqa: S108 - mkdtemp makes it 0700
    folder = DataFolder(Path(tempfile.mkdtemp(prefix=DEMO_PREFIX, dir=parent)))
    try:
        with _fabric(folder, arguments.model, steps, ends) as ready:
            demo = Demo(ready, steps, ends)
            demo.run()
        untrue = demo.untrue
        if ready.status != 0:
            untrue.append(f"`up` ended with status {ready.status}")
        untrue += [f"process {p.pid} was left running" for p in ready.processes if is_alive(p)]
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
    _report(demo, untrue, ready, steps.seconds, as_json=arguments.json)
    return FAILED if untrue else 0


@dataclass(slots=True)
class Ready:
    """The fabric that `up` started."""

    url: str
    seconds: float
    phases: dict[str, float]
    model: str
    operator_key: str | None = field(default=None, repr=False)
    processes: list[ProcessId] = field(default_factory=list)  # all that it recorded
    status: int | None = None  # of `up`, once it has ended


@contextlib.contextmanager
def _fabric(folder: DataFolder, model: str, steps: Steps, ends: list[int]) -> Iterator[Ready]:
    """Run `macfabric up` while the body runs."""
    (folder.path / "logs").mkdir()
    log = folder.log(UP)
    keeper = Keeper(folder.log("demo-keeper"))
    try:
        argv = [sys.executable, "-m", "router.cli.main", "up", "--json", "--port", "0"]
        argv += ["--nodes", str(NODES), "--data", str(folder.path), "--model", model]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[3])}
        steps.say(f"starting {NODES} nodes in {folder.path}")
        keeper.start(UP, argv, environment, log, piped=True)
        ready = _await_ready(keeper, log, steps, ends)
        ready.operator_key = folder.read_operator_key()
        try:
            yield ready
        finally:
            ready.processes += folder.read_run()[1].values()
            steps.say("stopping everything")
            for event in keeper.end([UP], STOP_GRACE_S):
                if event["event"] == "exited" and event["name"] == UP:
                    ready.status = event["status"]
    finally:
        keeper.close()


def _await_ready(keeper: Keeper, log: Path, steps: Steps, ends: list[int]) -> Ready:
    lines_shown = 0
    while steps.seconds < START_TIMEOUT_S and not ends:
        event = keeper.next_event(0.2)
        lines = read_log(log).splitlines()
        for line in lines[lines_shown:]:
            steps.say(f"  up: {line.partition('] ')[2] or line}")
        lines_shown = len(lines)
        if event is None:
            continue
        if event["event"] == "exited":
            message = f"the fabric did not start (status {event['status']}), see above"
            raise CommandError(message)
        if event["event"] == "line":
            value = json.loads(event["text"])
            return Ready(value["url"], value["seconds"], value["phases"], value["model"])
    message = "interrupted" if ends else f"the fabric did not start within {START_TIMEOUT_S:g} s"
    raise CommandError(message)


class Demo:
    """Conversation that brings every agent through one cache state after another."""

    def __init__(self, ready: Ready, steps: Steps, ends: list[int]) -> None:
        self._fabric = Fabric(ready.url, operator_key=ready.operator_key)
        self._say = steps.say
        self._ends = ends
        name = ready.model.rstrip("/").rpartition("/")[2]
        self._speaker = Speaker(self._fabric, name)
        self._talks = [Conversation(agent) for agent in make_agents()]
        self.pulse = Pulse(ready.url)
        self.untrue: list[str] = []
        self.moves: list[dict[str, Any]] = []
        self.restart_seconds: list[float] = []

    @property
    def turns(self) -> list[DemoTurn]:
        return [turn for talk in self._talks for turn in talk.turns]

    @property
    def agents(self) -> list[str]:
        return [talk.agent.name for talk in self._talks]

    def run(self) -> None:
        self.pulse.start()
        try:
            order = self._talks
            for state, prepare in (
                (COLD, self._nothing),
                (HOT, self._nothing),
                (DISK, self._restart_all),
                (PEER, self._move_all),
            ):
                self._say(f"{state}: {MEANING[state]}")
                prepare()
                for talk in order:
                    self._ask(talk, state)
                order = order[::-1]  # the router loads ahead what follows in a known order
            self._say(f"{KILLED}: {MEANING[KILLED]}")
            self._kill_one()
        finally:
            self.pulse.stop()
        self.untrue += [f"the endpoint was down: {why}" for why in self.pulse.failures]

    def _ask(self, talk: Conversation, state: str) -> None:
        if self._ends:
            message = "interrupted"
            raise CommandError(message)
        previous = talk.turns[-1] if talk.turns else None
        turn = self._speaker.ask(talk, talk.agent.facts[STATES.index(state)], state)
        problem = problem_of(turn, previous)
        reused = f"{turn.cached_tokens:,} of {turn.prompt_tokens:,} tokens reused"
        exchange = f"“{turn.question}” → “{turn.answer.strip()}”"
        mark = f"UNTRUE: {problem}" if problem else "right"
        self._say(
            f"  {turn.agent} on {turn.node or '?'}: {turn.first_token_ms:.0f} ms, {turn.cache}, "
            f"{reused}; {exchange} {mark}"
        )
        if problem:
            self.untrue.append(f"{turn.agent}, {state}: {problem}")

    def _nothing(self) -> None:
        """Change nothing before the turn."""

    def _restart_all(self) -> None:
        """Kill every node, in two waves so that one of them always serves."""
        names = sorted(nodes_by_name(self._fabric))
        for wave in (names[1:], names[:1]):
            before = nodes_by_name(self._fabric)
            for name in wave:
                os.kill(int(before[name]["pid"]), signal.SIGKILL)
            seconds = wait_for_restart(self._fabric, before, wave, RESTART_TIMEOUT_S)
            self.restart_seconds.append(round(seconds, 2))
            self._say(f"  {' and '.join(wave)}: killed, back after {seconds:.1f} s")

    def _move_all(self) -> None:
        """Move every agent to the node after its own."""
        names = sorted(nodes_by_name(self._fabric))
        for talk in self._talks:
            home = talk.turns[-1].node
            target = names[(names.index(home) + 1) % len(names)] if home in names else names[0]
            moved = self._fabric.agent(talk.agent.name).migrate(target)
            self.moves.append(moved)
            self._say(
                f"  {talk.agent.name}: {moved.get('from')} → {moved.get('to')}, "
                f"{moved.get('bytes_sent', 0) / 1e6:.1f} MB in {moved.get('seconds', 0):.2f} s"
            )

    def _kill_one(self) -> None:
        """Kill the node with the most agents and ask all of them at once."""
        homes = Counter(talk.turns[-1].node for talk in self._talks)
        victim = homes.most_common(1)[0][0]
        bereft = [talk for talk in self._talks if talk.turns[-1].node == victim]
        pid = nodes_by_name(self._fabric).get(victim, {}).get("pid")
        if not isinstance(pid, int):
            message = f"cannot find the process of {victim} to kill it"
            raise CommandError(message)
        os.kill(pid, signal.SIGKILL)
        self._say(f"  {victim} is dead; asking {', '.join(t.agent.name for t in bereft)}")
        with ThreadPoolExecutor(len(bereft)) as pool:
            list(pool.map(lambda talk: self._ask(talk, KILLED), bereft))


def _report(demo: Demo, untrue: list[str], ready: Ready, seconds: float, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "ok": not untrue,
                "untrue": untrue,
                "turns": as_record(demo.turns),
                "ratios": ratios(demo.turns),
                "moves": demo.moves,
                "restart_seconds": demo.restart_seconds,
                "seconds": round(seconds, 1),
                "start_seconds": ready.seconds,
                "start_phases": ready.phases,
                "pulse": {
                    "asked": demo.pulse.asked,
                    "failures": demo.pulse.failures,
                    "slowest_ms": round(demo.pulse.slowest_ms, 1),
                },
            }
        )
        return
    show(demo.agents, demo.turns, demo.pulse, seconds)
    for problem in untrue:
        print_line(f"UNTRUE: {problem}")
