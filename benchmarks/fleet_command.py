"""`python -m benchmarks.fleet_command`: emulated Macs for interactive use."""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import namespaces
from benchmarks.emulated_fleet import EmulatedFleet, FleetError

FAILED = 1
DOWN_TIMEOUT_S = 30.0
_POLL_S = 0.05


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except FleetError as error:
        print(f"fleet_command: {error}", file=sys.stderr)
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet_command",
        description="Macs emulated by network namespaces: en0 on a common switch, thunderboltK on "
        "direct cables between every two. Needs root on Linux.",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(name: str, run: Any, text: str, *, mac: bool = False) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="print JSON")
        if name not in ("up", "list", "sweep"):
            added.add_argument("--fleet", type=int, metavar="N", help="its number, if several run")
        if mac:
            added.add_argument("mac", type=int, metavar="MAC", help="number of the Mac, from 0")
        return added

    up = verb("up", _up, "make a fleet and keep it until interrupted")
    up.add_argument("--macs", type=int, default=2, help="how many (default: 2)")
    _rates(up, 1000, 10_000)
    up.add_argument("--host-link", action="store_true", help="put this machine on the Ethernet too")
    inside = verb("exec", _exec, "run a command in a Mac and wait for it", mac=True)
    inside.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    _rates(verb("shape", _shape, "change the links' rates"), None, None)
    for name, text in (("cut", "pull the cable of a device"), ("restore", "plug it in again")):
        verb(name, _cable, text, mac=True).add_argument("device", metavar="DEVICE")
    for name, text in (("block", "lose what MAC sends to PEER"), ("unblock", "undo `block`")):
        verb(name, _block, text, mac=True).add_argument("peer", type=int, metavar="PEER")
    verb("down", _down, "end a fleet")
    verb("list", _list, "show the fleets of this machine")
    verb("sweep", _sweep, "remove what fleets of dead owners left behind")
    parser.set_defaults(verb=None)
    for name, added in verbs.choices.items():
        added.set_defaults(verb=name)
    return parser


def _rates(parser: argparse.ArgumentParser, ethernet: int | None, thunderbolt: int | None) -> None:
    text = "Mbit/s in each direction; 0: unlimited"
    parser.add_argument("--ethernet-mbit", type=int, default=ethernet, metavar="N", help=text)
    parser.add_argument("--thunderbolt-mbit", type=int, default=thunderbolt, metavar="N", help=text)


def _view(fleet: EmulatedFleet) -> dict[str, Any]:
    macs = []
    for mac in range(fleet.macs):
        hosts = {"en0": fleet.ethernet_host(mac)}
        for a, b in fleet.cables or []:
            if mac in (a, b):
                peer = b if mac == a else a
                hosts[fleet.thunderbolt_device(mac, peer)] = fleet.thunderbolt_host(mac, peer)
        macs.append({"namespace": fleet.namespace(mac), "hosts": hosts})
    return {"fleet": fleet.number, "owner_pid": fleet.owner_pid, "macs": macs}


def _show(view: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(view), flush=True)
        return
    print(f"fleet {view['fleet']} of process {view['owner_pid']}")
    for mac, row in enumerate(view["macs"]):
        hosts = "  ".join(f"{device} {host}" for device, host in row["hosts"].items())
        print(f"  {mac}: {hosts}", flush=True)


def _up(arguments: argparse.Namespace) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    fleet = EmulatedFleet(
        arguments.macs,
        arguments.ethernet_mbit,
        arguments.thunderbolt_mbit,
        host_link=arguments.host_link,
        by_command=True,
    )
    try:
        with fleet:
            _show(_view(fleet), as_json=arguments.json)
            while True:
                signal.pause()
    except KeyboardInterrupt:
        return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _exec(arguments: argparse.Namespace) -> int:
    command = [word for i, word in enumerate(arguments.command) if i or word != "--"]
    if not command:
        message = "name a command: exec MAC COMMAND ..."
        raise FleetError(message)
    namespace = EmulatedFleet.find(arguments.fleet).namespace(arguments.mac)
    sys.stdout.flush()
    os.execvp("ip", ["ip", "netns", "exec", namespace, *command])  # noqa: S606, S607


def _shape(arguments: argparse.Namespace) -> int:
    fleet = EmulatedFleet.find(arguments.fleet)
    fleet.shape(arguments.ethernet_mbit, arguments.thunderbolt_mbit)
    rates = {
        "ethernet_mbit": arguments.ethernet_mbit,
        "thunderbolt_mbit": arguments.thunderbolt_mbit,
    }
    return _done(arguments, {key: rate for key, rate in rates.items() if rate is not None})


def _cable(arguments: argparse.Namespace) -> int:
    fleet = EmulatedFleet.find(arguments.fleet)
    (fleet.cut if arguments.verb == "cut" else fleet.restore)(arguments.mac, arguments.device)
    return _done(arguments, {"mac": arguments.mac, "device": arguments.device})


def _block(arguments: argparse.Namespace) -> int:
    fleet = EmulatedFleet.find(arguments.fleet)
    (fleet.block if arguments.verb == "block" else fleet.unblock)(arguments.mac, arguments.peer)
    return _done(arguments, {"mac": arguments.mac, "peer": arguments.peer})


def _done(arguments: argparse.Namespace, what: dict[str, Any]) -> int:
    words = "  ".join(f"{key} {value}" for key, value in what.items())
    print(
        json.dumps({"done": arguments.verb, **what})
        if arguments.json
        else f"{arguments.verb}: {words}"
    )
    return 0


def _down(arguments: argparse.Namespace) -> int:
    fleet = EmulatedFleet.find(arguments.fleet)
    if not fleet.by_command:
        message = f"fleet {fleet.number} belongs to process {fleet.owner_pid}, which needs it"
        raise FleetError(message)
    os.kill(fleet.owner_pid, signal.SIGTERM)
    deadline_s = time.monotonic() + DOWN_TIMEOUT_S
    while fleet.number in namespaces.records():
        if time.monotonic() > deadline_s:
            message = f"process {fleet.owner_pid}, which owns fleet {fleet.number}, does not end"
            raise FleetError(message)
        time.sleep(_POLL_S)
    return _done(arguments, {"fleet": fleet.number})


def _list(arguments: argparse.Namespace) -> int:
    views = [_view(EmulatedFleet.find(number)) for number in namespaces.records()]
    if arguments.json:
        print(json.dumps(views))
    else:
        for view in views:
            _show(view, as_json=False)
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    return _done(arguments, {"removed": namespaces.sweep()})


if __name__ == "__main__":
    sys.exit(main())
