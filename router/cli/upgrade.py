"""`macfabric upgrade`: run the installed code on every node, one after the other, then the router.

    a node:      drain ─► restart its process ─► ready, with the installed code ─► undrain
    the router:  a standby takes over, if there is one ─► streams end ─► the process restarts

A node that runs the installed code is skipped, so an interrupted command continues where it
stopped. The node that it has drained is noted in the data folder: others may be drained by hand.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from fabric import CONTROL_VERSION, CONTROL_VERSION_MIN, PROTOCOL_VERSION
from fabric.hosting.installed_code import installed_code
from fabric.limits import STOP_WAIT_S_MAX
from router.cli.code_check import require_startable
from router.cli.data_folder import DataFolder, default_data_dir, read_json
from router.cli.endpoint import add_fabric_options, fabric_of
from router.cli.errors import INTERRUPTED, MISUSED, CommandError
from router.cli.output import Steps, human_bytes, print_table
from router.cli.terminal import print_error, print_json
from router.client.client import Fabric
from router.client.http_api import ClientError, RefusedError
from router.private_files import write_private
from router.supervise.failures import last_words
from router.supervise.ray_processes import read_log

POLL_S: Final = 0.5
WAIT_S: Final = 30.0  # for running turns
SILENT_S: Final = 15.0  # of a router, before that is shown
READY_S: Final = 900.0  # for a node to start: a large model loads for minutes
RESTART: Final = "stop the fabric with `macfabric down`, and start it with `macfabric up`"
STAY: Final = "those on its disk stay there, and their turns get 503 meanwhile"
LOST: Final = "what is in memory only is computed again"
CONTINUE_HINT: Final = "run `macfabric upgrade` again to continue there"
SERVING: Final = frozenset({"ready", "draining"})
PHASES: Final = {"suspect": "does not answer yet", "expired": "does not answer"}
Json = dict[str, Any]


def add_upgrade(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "upgrade",
        description="Restart each node and then the router with the installed code: "
        "move the node's agents to the others, restart its process, wait until it serves, and let "
        "it take agents again. Stops at the first node that does not come back. An interrupted "
        "command continues where it stopped. The agents of the only node stay on its disk, and "
        "their turns get 503 meanwhile. Ray and `macfabric up` themselves are not restarted.",
    )
    parser.add_argument(
        "--nodes", nargs="+", default=[], metavar="NODE", help="only these nodes, not the router"
    )
    parser.add_argument(
        "--router", action="store_true", help="only the router, or it as well as --nodes"
    )
    parser.add_argument(
        "--force", action="store_true", help="also restart what runs the installed code already"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_S,
        metavar="S",
        help="how long turns and streams may take to end before a process restarts; those that "
        f"take longer end with an error (default: {WAIT_S:g})",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=READY_S,
        metavar="S",
        help=f"how long a node may take to start (default: {READY_S:g})",
    )
    add_fabric_options(parser)
    parser.set_defaults(run=run_upgrade)


def run_upgrade(arguments: argparse.Namespace) -> int:
    """Upgrade the chosen nodes, and the router."""
    if not 0 <= arguments.wait <= STOP_WAIT_S_MAX:
        message = f"--wait must be 0 to {STOP_WAIT_S_MAX:g}"
        raise CommandError(message, MISUSED)
    record = DataFolder((arguments.data or default_data_dir()).expanduser()).upgrade
    progress = UpgradeProgress(Steps(quiet=arguments.json), as_json=arguments.json)
    limits = UpgradeLimits(arguments.wait, arguments.timeout, is_forced=arguments.force)
    upgrade = Upgrade(fabric_of(arguments), limits, record, progress)
    try:
        results = _run(upgrade, arguments)
    except KeyboardInterrupt:
        where = f"{upgrade.node} may be drained or restarting; " if upgrade.node else ""
        message = f"interrupted: {where}{CONTINUE_HINT}"
        raise CommandError(message, INTERRUPTED) from None
    if arguments.json:
        print_json({"results": results})
    else:
        rows = [(row["name"], row["result"], row["moved"], row["stayed"]) for row in results]
        print_table("Upgrade", ("process", "result", "moved", "stayed"), rows)
    return 0


def _run(upgrade: "Upgrade", arguments: argparse.Namespace) -> list[Json]:
    rows = upgrade.rows()
    only_router = arguments.router and not arguments.nodes
    chosen = [] if only_router else upgrade.choose(rows, arguments.nodes)
    upgrade.check_versions(chosen)
    has_router = arguments.router or not arguments.nodes
    upgrade.check_code(chosen, has_router=has_router)
    results = [upgrade.upgrade_node(row["name"]) for row in chosen]
    if has_router:
        results.append(upgrade.upgrade_router())
    return results


class UpgradeProgress:
    """Printer of steps, as lines or as JSON objects, on standard error."""

    def __init__(self, steps: Steps, *, as_json: bool) -> None:
        self._steps = steps
        self._as_json = as_json

    def note(self, name: str, event: str, text: str, **figures: object) -> None:
        """Show one step of a process."""
        if self._as_json:
            print_error(json.dumps({"name": name, "event": event, **figures}))
        else:
            self._steps.say(f"{name}: {text}")


@dataclass(frozen=True, slots=True)
class UpgradeLimits:
    """Time limits for turns and starts, and whether to restart processes that are up to date."""

    wait_s: float
    ready_s: float
    is_forced: bool = False


@dataclass(slots=True)
class Upgrade:
    """Upgrade of the processes of one fabric."""

    fabric: Fabric
    limits: UpgradeLimits
    record: Path  # file with the name of the node that this command has drained
    progress: UpgradeProgress
    node: str | None = None  # the node that is being upgraded

    def rows(self) -> list[Json]:
        """Return the nodes; raise CommandError without the details for operators."""
        rows = self.fabric.nodes()
        if any("health" in row and "incarnation" not in row for row in rows):
            message = f"an upgrade needs an operator's key: {self.fabric.hints.forbidden}"
            raise CommandError(message)
        return rows

    def choose(self, rows: list[Json], names: list[str]) -> list[Json]:
        """Return the rows of `names`, or all; raise CommandError unless all of them serve."""
        by_name = {str(row.get("name")): row for row in rows}
        unknown = [name for name in names if name not in by_name]
        if unknown:
            message = f"no node is called {unknown[0]!r}; known: {', '.join(sorted(by_name))}"
            raise CommandError(message, MISUSED)
        chosen = [by_name[name] for name in dict.fromkeys(names)] if names else rows
        drained = self._noted_node()
        for row in chosen:
            is_serving = row.get("state") in SERVING
            if not is_serving and row.get("name") != drained:
                failure = f" ({row['failure']})" if row.get("failure") else ""
                message = (
                    f"{row.get('name')} is {row.get('state')}{failure}: fix that first, or "
                    "name the others with --nodes"
                )
                raise CommandError(message)
        return chosen

    def check_versions(self, rows: list[Json]) -> None:
        """Raise CommandError if the installed code cannot run beside the running one."""
        router = self._router()
        speaks, least = router.get("control", 1), router.get("control_min", 1)
        if rows and (speaks < CONTROL_VERSION_MIN or least > CONTROL_VERSION):
            message = (
                "the installed version changes how router and nodes talk to each other, so nodes "
                f"cannot be upgraded one by one: {RESTART}; agents stay on disk"
            )
            raise CommandError(message)
        for row in rows:
            build, name = row.get("build") or {}, str(row.get("name"))
            installed = _installed_version("ray")
            if installed and build.get("ray", installed) != installed:
                message = (
                    f"Ray {installed} is installed and {name} runs {build['ray']}, and the "
                    f"two versions cannot talk to each other: {RESTART}"
                )
                raise CommandError(message)
            if row.get("protocol") not in {None, PROTOCOL_VERSION}:
                text = (
                    "nodes of the two versions do not exchange caches; agents may stay on its disk"
                )
                self.progress.note(name, "other_protocol", text)
            if any(build.get(key, has) != has for key, has in _numerics().items()):
                text = "MLX changed: caches of the previous version are not used, and are computed"
                self.progress.note(name, "other_numerics", text)

    def check_code(self, rows: list[Json], *, has_router: bool) -> None:
        """Raise CommandError if what will restart cannot start with the installed code."""
        if any(self._restarts("node", row) for row in rows):
            require_startable("node")
        if has_router and self._restarts("router", {"build": self._router()}):
            require_startable("router")

    def _restarts(self, package: str, row: Json) -> bool:
        return self.limits.is_forced or _code(row) != installed_code(package)

    # --- nodes ---------------------------------------------------------------------------------

    def upgrade_node(self, name: str) -> Json:
        """Upgrade one node and return the result."""
        self.node, began_s = name, time.monotonic()
        result: Json = {"name": name, "result": "current", "moved": 0, "stayed": 0}
        is_ours = self._noted_node() == name
        row = self._await(name, _serves, "does not serve", is_patient=is_ours)
        if self._restarts("node", row):
            is_ours = self._empty(row, result) or is_ours
            self._restart(self._await(name, _serves, "does not serve"))
            result["result"] = "upgraded"
        else:
            self.progress.note(name, "current", "runs the installed code already")
        if is_ours:
            self.fabric.undrain(name)
            self._await(name, lambda row: row.get("state") == "ready", "takes no agents")
            self.record.unlink(missing_ok=True)
            self.progress.note(name, "undrained", "takes agents again")
        self.node = None
        return result | {"seconds": round(time.monotonic() - began_s, 2)}

    def _empty(self, row: Json, result: Json) -> bool:
        """Move a node's agents to others; return whether this command has drained it."""
        name = str(row["name"])
        was_draining = row.get("state") == "draining"
        others = [each for each in self.rows() if each.get("name") != name]
        if not any(_takes_agents_of(row, each) for each in others):
            text = f"no other node can take its agents: {STAY}; {LOST}"
            self.progress.note(name, "stays", text)
            result["stayed"] = row.get("agents", 0)
            return False
        if not was_draining:
            self._note(name)
        self.progress.note(name, "draining", "moving its agents to the other nodes")
        drain = self.fabric.drain(name)
        while drain.get("state") == "draining":
            time.sleep(POLL_S)
            drain = self._row(name).get("drain") or {"state": "ended"}
        if drain["state"] == "ended":
            message = f"the drain of {name} was ended by `undrain`; {CONTINUE_HINT}"
            raise CommandError(message)
        moved, remaining = drain.get("agents_moved", 0), drain.get("agents_left", 0)
        result |= {"moved": moved, "stayed": remaining}
        text = f"{moved} agents moved, {human_bytes(drain.get('bytes_sent'))} sent"
        if remaining:
            why = next((str(each.get("message")) for each in drain.get("stuck") or ()), "")
            text += f"; {remaining} not moved{f' ({why})' if why else ''}: {STAY}; {LOST}"
        self.progress.note(name, "drained", text, moved=moved, stayed=remaining)
        return not was_draining

    def _restart(self, row: Json) -> None:
        """Restart a node's process; return once it serves with the installed code."""
        name, before = str(row["name"]), row.get("incarnation")
        self.progress.note(name, "restarting", "restarting its process")
        try:
            self.fabric.restart_node(name, self.limits.wait_s)
        except RefusedError as error:
            if error.status < 500:  # an older version, or another router is active
                raise
            self.progress.note(name, "unanswered", str(error))  # it may restart anyway
        began_s = time.monotonic()
        restarted = self._await(
            name,
            lambda row: _serves(row) and row["incarnation"] != before,
            "did not come back",
            before=before,
        )
        seconds = round(time.monotonic() - began_s, 1)
        test = restarted.get("self_test") or {}
        if not test.get("passed"):
            raise self._stopped_error(name, f"fails its self-test: {test.get('detail')}")
        if not self.limits.is_forced and _code(restarted) != installed_code("node"):
            raise self._stopped_error(name, "restarted with other code than installed here")
        self.progress.note(name, "ready", f"serves again after {seconds} s", seconds=seconds)

    def _await(
        self,
        name: str,
        holds: Callable[[Json], bool],
        what: str,
        *,
        is_patient: bool = False,
        before: object = None,
    ) -> Json:
        """Return the node's row once `holds` is true of it; `before` is the process that ends.

        Raise CommandError if it takes too long, or unless `is_patient` if the node cannot start.
        """
        deadline_s, phase = time.monotonic() + self.limits.ready_s, object()
        while time.monotonic() < deadline_s:
            row = self._row(name)
            if holds(row):
                return row
            if row.get("failure") and not is_patient:
                raise self._stopped_error(name, f"does not start: {row['failure']}")
            is_old = before is not None and row.get("incarnation") == before
            if row.get("state") != phase and not (is_old and row.get("state") in SERVING):
                phase = row.get("state")
                text = PHASES.get(str(phase), str(phase or "the router does not answer"))
                self.progress.note(name, "waiting", text, state=phase)
            time.sleep(POLL_S)
        raise self._stopped_error(name, f"{what} within {self.limits.ready_s:g} s")

    def _stopped_error(self, name: str, why: str) -> CommandError:
        serving = [str(row.get("name")) for row in self._rows() if _serves(row)]
        others = ", ".join(each for each in serving if each != name)
        still = f"still serving: {others}" if others else "no other node serves: turns get 503"
        log = f"`macfabric logs --node {name}` there, and what `macfabric up` prints, may say more"
        return CommandError(
            f"{name} {why}. The other nodes were left as they are; {still}. {log}. Install the "
            f"right code on its machine, or the previous version, then {CONTINUE_HINT}"
        )

    def _row(self, name: str) -> Json:
        """Return a node's row; empty while the router does not answer."""
        return next((row for row in self._rows() if row.get("name") == name), {"name": name})

    def _rows(self) -> list[Json]:
        """Return the nodes; none while the router does not answer."""
        try:
            return self.rows()
        except RefusedError as error:
            if error.status < 500:
                raise
            return []
        except ClientError:
            return []

    def _note(self, name: str) -> None:
        if self.record.parent.is_dir():
            write_private(self.record, json.dumps({"node": name}))

    def _noted_node(self) -> object:
        return read_json(self.record).get("node")

    # --- router --------------------------------------------------------------------------------

    def upgrade_router(self) -> Json:
        """Upgrade the router at the URL and return the result."""
        name, before, began_s = "router", self.fabric.router(), time.monotonic()
        result: Json = {"name": name, "result": "current", "moved": 0, "stayed": 0}
        if not self._restarts("router", {"build": before}):
            self.progress.note(name, "current", "runs the installed code already")
            return result
        text = f"restarting; its streams get {self.limits.wait_s:g} s to end, new requests wait"
        if before.get("role") == "active":
            text = "restarting; a standby takes over first, if one runs"
        self.progress.note(name, "restarting", text)
        printed = self._router_log()
        self.fabric.restart_router(self.limits.wait_s)
        deadline_s, answered_s = began_s + self.limits.wait_s + self.limits.ready_s, began_s
        while (process := self._router().get("process")) in {None, before.get("process")}:
            now_s = time.monotonic()
            if now_s > deadline_s:
                words = last_words(self._router_log().removeprefix(printed))
                raise CommandError(_router_failure(words))
            if process is not None:
                answered_s = now_s
            elif now_s - answered_s > SILENT_S:
                answered_s = deadline_s  # once
                words = last_words(self._router_log().removeprefix(printed))
                self.progress.note(name, "waiting", words or "does not answer yet", state=None)
            time.sleep(POLL_S)
        seconds = round(time.monotonic() - began_s, 1)
        self.progress.note(name, "ready", f"serves again after {seconds} s", seconds=seconds)
        return result | {"result": "upgraded", "seconds": seconds}

    def _router_log(self) -> str:
        """Return the output of this machine's router."""
        return read_log(DataFolder(self.record.parent).log("router"))

    def _router(self) -> Json:
        try:
            return self.fabric.router()
        except ClientError:
            return {}


def _router_failure(words: str) -> str:
    return (
        f"the router did not come back{f' ({words})' if words else ''}, and clients get no answer. "
        "The nodes keep their agents. Fix the router's code, or install the previous version: "
        "`macfabric up`, or whatever runs the router, retries its start every few seconds"
    )


def _serves(row: Json) -> bool:
    return "incarnation" in row and row.get("health") == "alive" and not row.get("failure")


def _takes_agents_of(row: Json, other: Json) -> bool:
    is_alike = all(other.get(key) == row.get(key) for key in ("fingerprint", "protocol"))
    return is_alike and other.get("state") == "ready" and _serves(other)


def _code(row: Json) -> object:
    return (row.get("build") or {}).get("code")


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _numerics() -> dict[str, str]:
    """Return the installed versions on which the bits of caches depend, by a node's names."""
    versions = {"mlx": _installed_version("mlx"), "mlx_lm": _installed_version("mlx-lm")}
    return {name: has for name, has in versions.items() if has is not None}
