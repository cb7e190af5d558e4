"""Share of a link that the data plane uses, between two emulated Macs.

Both ends are separate processes, each in a network namespace, with the node's own server, block
store and fetch; `tc` shapes the links between them. Every figure is compared with that of iperf3
over the same link in the same round with as many streams. A namespace's cable is not Thunderbolt
and its switch not a switch: the benchmark measures only the overhead of the code.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.emulated_fleet import EmulatedFleet, missing_requirement
from benchmarks.report import Limit, Report, say
from fabric.limits import MIB
from fabric.settings import AUTO, ENCRYPTION_MODES
from node.limits import TRANSFER_STREAMS

DESCRIPTION = "the data plane's share of shaped links, two at once, and one that is cut"

RATES_MBIT = (1_000, 2_500, 10_000)
QUICK_MBIT = (1_000,)
ROUNDS = 5
BLOCKS = 32  # of 9.4 MB
BULK_BYTES_MIN = 64 * MIB
BULK_S = 0.5  # least duration of a round, if there are enough blocks
IPERF_S = 1
REACHED_MIN = 0.9  # of the nominal rate; with less, the machine cannot shape it
BULK_SHARE_MIN = 0.92
BLOCK_SHARE_MIN = 0.70
TWO_LINKS_MIN = 1.8
UNSHAPED_SHARE_MIN = 0.85
CUT_FAST_MBIT, CUT_SLOW_MBIT = 2_500, 1_000
CUT_AFTER_BLOCKS = 6
CUT_SENT_MAX = 1.1  # of the payload: the dead link's buffers are lost
CUT_LATE_MAX_S = 2.0  # in addition to the slow link's time for the rest; detection takes one
SENDER, RECEIVER = 0, 1

Link = tuple[str, str, int]  # host, kind, nominal Mbit/s


@dataclass(slots=True)
class Ends:
    """The two processes, and their pipes."""

    fleet: EmulatedFleet
    sender: subprocess.Popen[str]
    receiver: subprocess.Popen[str]
    block_bytes: int
    encrypt_links: str

    @classmethod
    def start(cls, fleet: EmulatedFleet, folder: Path, encrypt_links: str = AUTO) -> Self:
        """Store the blocks and describe them to the receiver."""
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        end = [sys.executable, "-m", "benchmarks.transfer_ends"]
        sender = fleet.exec(SENDER, [*end, "send", str(folder), str(BLOCKS)], **pipes)
        receiver = fleet.exec(RECEIVER, [*end, "receive"], **pipes)
        if shutil.which("iperf3") is not None:
            nowhere: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            fleet.exec(SENDER, ["iperf3", "-s"], **nowhere)
        offer = _answer(sender)
        _tell(receiver, offer)
        return cls(fleet, sender, receiver, offer["refs"][0][-1], encrypt_links)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for end in (self.receiver, self.sender):
            assert end.stdin is not None, "started with a pipe"
            end.stdin.close()
            end.wait(30)

    def cable(self, mbit: int) -> Link:
        """Return the direct cable as an address to fetch from."""
        return (self.fleet.thunderbolt_host(SENDER, RECEIVER), "thunderbolt", mbit)

    def ethernet(self, mbit: int) -> Link:
        """Return the address on the switch."""
        return (self.fleet.ethernet_host(SENDER), "ethernet", mbit)

    def fetch(self, links: Sequence[Link], blocks: int, **options: Any) -> dict[str, Any]:
        """Fetch the first `blocks` blocks; return the receiver's report."""
        order = {"links": links, "blocks": blocks, "encrypt_links": self.encrypt_links}
        _tell(self.receiver, order | options)
        return _answer(self.receiver)

    def sent_bytes(self) -> int:
        """Return the payload bytes that the sender has sent so far."""
        _tell(self.sender, {})
        return int(_answer(self.sender)["bytes"])

    def iperf_mbit(self, link: Link, streams: int = TRANSFER_STREAMS) -> float | None:
        """Return iperf3's rate over the same link; None without iperf3."""
        if shutil.which("iperf3") is None:
            return None
        argv = ["iperf3", "-c", link[0], "-R", "-J", "-t", str(IPERF_S), "-P", str(streams)]
        for _ in range(50):
            ran = self.fleet.exec(RECEIVER, argv, stdout=subprocess.PIPE, text=True)
            text = ran.communicate()[0]
            if ran.returncode == 0:
                return float(json.loads(text)["end"]["sum_received"]["bits_per_second"]) / 1e6
            time.sleep(0.1)  # the server is not listening yet, or not again
        message = f"iperf3 fails: {text[-300:]}"
        raise RuntimeError(message)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each is measured")
    parser.add_argument(
        "--encrypt-links",
        choices=ENCRYPTION_MODES,
        default=AUTO,
        help="as node.encrypt_links (default: auto, which leaves the cable readable)",
    )
    parser.add_argument("--folder", help="where the sender stores its blocks")


def run(arguments: argparse.Namespace) -> Report:
    """Measure one link, two, none shaped, and one that is cut."""
    reason = missing_requirement()
    if reason is not None:
        print(f"bench transfer needs emulated Macs: {reason}", file=sys.stderr)
        raise SystemExit(2)
    rounds = 2 if arguments.quick else arguments.rounds
    rates = QUICK_MBIT if arguments.quick else RATES_MBIT
    figures: dict[str, dict[str, float]] = {}
    limits: list[Limit] = []
    notes = ["shares are medians over the rounds of what was measured side by side"]
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        EmulatedFleet(macs=2) as fleet,
        Ends.start(fleet, Path(folder), arguments.encrypt_links) as ends,
    ):
        for mbit in rates:
            limits += measure_rate(ends, mbit, rounds, figures, notes)
        limits += measure_unshaped(ends, rounds, figures, notes)
        limits += measure_two(ends, rounds, figures)
        cut, cut_limits = measure_cut(ends)
        limits += cut_limits
    ratios = {limit.statement: limit.figure for limit in limits}
    parameters = {"rounds": rounds, "streams": TRANSFER_STREAMS, "block_bytes": ends.block_bytes}
    return Report(parameters, {"links": figures, "cut": cut}, ratios, tuple(limits), tuple(notes))


def measure_rate(
    ends: Ends,
    mbit: int,
    rounds: int,
    figures: dict[str, dict[str, float]],
    notes: list[str],
) -> list[Limit]:
    """Fill one shaped cable with many blocks, and with one."""
    say(f"{mbit} Mbit/s")
    ends.fleet.shape(thunderbolt_mbit=mbit)
    link = ends.cable(mbit)
    blocks = _blocks(ends, mbit)
    ends.fetch([link], 1)  # warms up connections and pages, as for any later transfer
    reached, bulk, single, cold = [], [], [], []
    for _ in range(rounds):
        reached.append(ends.iperf_mbit(link) or float(mbit))
        bulk.append(_mbit(ends.fetch([link], blocks)))
        single += [_mbit(ends.fetch([link], 1)) for _ in range(3)]
        cold.append(_mbit(ends.fetch([link], 1, cold=True)))
    ceiling = float(mbit)
    if statistics.median(reached) < REACHED_MIN * mbit:
        ceiling = statistics.median(reached)
        notes.append(f"at {mbit} Mbit/s this machine shapes {ceiling:.0f}: shares are of that")
    figures[f"{mbit} Mbit/s"] = {
        "iperf3": statistics.median(reached),
        "bulk": statistics.median(bulk),
        "bulk MB": blocks * ends.block_bytes / 1e6,
        "one block": statistics.median(single),
        "one block, cold": statistics.median(cold),
    }
    return [
        _least(f"{mbit} Mbit/s, bulk", statistics.median(bulk) / ceiling, BULK_SHARE_MIN),
        _least(f"{mbit} Mbit/s, one block", statistics.median(single) / ceiling, BLOCK_SHARE_MIN),
    ]


def measure_unshaped(
    ends: Ends, rounds: int, figures: dict[str, dict[str, float]], notes: list[str]
) -> list[Limit]:
    """Compare with iperf3 where only the processors limit the rate."""
    say("unshaped")
    ends.fleet.shape(ethernet_mbit=0, thunderbolt_mbit=0)
    link = ends.cable(0)
    pairs = []
    ends.fetch([link], BLOCKS)
    for _ in range(2 * rounds):
        iperf = ends.iperf_mbit(link)
        if iperf is None:
            notes.append("iperf3 is not installed: nothing to compare the unshaped link with")
            return []
        pairs.append((iperf, _mbit(ends.fetch([link], BLOCKS))))
    figures["unshaped"] = {
        "iperf3": statistics.median(pair[0] for pair in pairs),
        "bulk": statistics.median(pair[1] for pair in pairs),
        "bulk MB": BLOCKS * ends.block_bytes / 1e6,
    }
    share = statistics.median(ours / theirs for theirs, ours in pairs)
    return [_least("unshaped, share of iperf3", share, UNSHAPED_SHARE_MIN)]


def measure_two(ends: Ends, rounds: int, figures: dict[str, dict[str, float]]) -> list[Limit]:
    """Compare two equal links with one of them."""
    say("two links")
    mbit = QUICK_MBIT[0]
    ends.fleet.shape(ethernet_mbit=mbit, thunderbolt_mbit=mbit)
    links = [ends.cable(mbit), ends.ethernet(mbit)]
    blocks = 2 * _blocks(ends, mbit)
    ends.fetch(links, 1)
    pairs = []
    for _ in range(rounds):
        one, two = ends.fetch(links[:1], blocks), ends.fetch(links, blocks)
        pairs.append((_mbit(one), _mbit(two)))
    figures[f"two of {mbit} Mbit/s"] = {
        "bulk": statistics.median(pair[1] for pair in pairs),
        "bulk MB": blocks * ends.block_bytes / 1e6,
        "one block": statistics.median(_mbit(ends.fetch(links, 1)) for _ in range(rounds)),
    }
    gain = statistics.median(two / one for one, two in pairs)
    return [_least("two equal links, times one", gain, TWO_LINKS_MIN)]


def measure_cut(ends: Ends) -> tuple[dict[str, float], list[Limit]]:
    """Pull the faster of two cables in the middle of a transfer."""
    say("a cable is pulled")
    fleet = ends.fleet
    fleet.shape(ethernet_mbit=CUT_SLOW_MBIT, thunderbolt_mbit=CUT_FAST_MBIT)
    links = [ends.cable(CUT_FAST_MBIT), ends.ethernet(CUT_SLOW_MBIT)]
    before_bytes = ends.sent_bytes()
    order = {"links": links, "blocks": BLOCKS, "tell_at": CUT_AFTER_BLOCKS}
    _tell(ends.receiver, order)
    began_s = time.monotonic()
    _answer(ends.receiver)
    device = fleet.thunderbolt_device(SENDER, RECEIVER)
    fleet.cut(SENDER, device)
    cut_s = time.monotonic() - began_s
    report = _answer(ends.receiver)
    sent_bytes = ends.sent_bytes() - before_bytes
    fleet.restore(SENDER, device)
    over_slow_bytes = report["links"][1]
    slow_s = over_slow_bytes * 8e-6 / CUT_SLOW_MBIT
    again = report["wire_bytes"] - report["bytes"]
    figures = {
        "payload MB": report["bytes"] / 1e6,
        "cut after s": cut_s,
        "over the fast link MB": report["links"][0] / 1e6,
        "over the slow link MB": over_slow_bytes / 1e6,
        "seconds": report["seconds"],
        "sent / payload": sent_bytes / report["bytes"],
        "verified bytes that came twice": float(again),
    }
    late_s = report["seconds"] - slow_s
    return figures, [
        _most("cut: verified bytes that came twice", float(again), 0.0),
        _most("cut: bytes sent / payload", sent_bytes / report["bytes"], CUT_SENT_MAX),
        _most("cut: seconds beyond the slow link's share", late_s, CUT_LATE_MAX_S),
    ]


def _blocks(ends: Ends, mbit: int) -> int:
    wanted = max(BULK_BYTES_MIN, mbit * 1e6 / 8 * BULK_S)
    return min(BLOCKS, int(-(-wanted // ends.block_bytes)))


def _mbit(report: Mapping[str, Any]) -> float:
    return float(report["bytes"]) * 8e-6 / float(report["seconds"])


def _least(statement: str, figure: float, bound: float) -> Limit:
    return Limit(statement, figure, bound, is_least=True)


def _most(statement: str, figure: float, bound: float) -> Limit:
    return Limit(statement, figure, bound, is_least=False)


def _tell(end: subprocess.Popen[str], what: Mapping[str, Any]) -> None:
    assert end.stdin is not None, "started with a pipe"
    end.stdin.write(json.dumps(what) + "\n")
    end.stdin.flush()


def _answer(end: subprocess.Popen[str]) -> dict[str, Any]:
    assert end.stdout is not None, "started with a pipe"
    line = end.stdout.readline()
    if not line:
        message = "an end of the transfer has died; its output is above"
        raise RuntimeError(message)
    answer: dict[str, Any] = json.loads(line)
    return answer
