"""Checks of a real fabric's answers and disks during and after faults."""

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from fabric.errors import CorruptDataError
from fabric.record.manifest import Manifest, OwnerState, decode_manifest

KEPT_SHARE = 0.9  # of an acknowledged turn's tokens; templates add the rest
EXEMPT_S = 60.0  # a new router may serve from an older owner until it has found the later one


@dataclass(frozen=True)
class Violation:
    """Violation of an invariant."""

    at_s: float
    judge: str
    text: str


@dataclass(frozen=True)
class Ack:
    """Acknowledgement of a turn: a complete answer."""

    node: str
    epoch: int
    tokens: int
    at_s: float


@dataclass
class Judges:
    """Collector of the observations of clients and the nemesis; usable from any thread."""

    began_s: float = field(default_factory=time.monotonic)
    found: list[Violation] = field(default_factory=list)
    answers_count: int = 0
    judged_count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _acks: dict[str, Ack] = field(default_factory=dict)
    _faults: dict[str, float] = field(default_factory=dict)  # times of latest faults
    _reported: set[tuple[str, str]] = field(default_factory=set)

    def now_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self.began_s

    def fail(self, judge: str, text: str) -> None:
        """Record a violation once."""
        with self._lock:
            if (judge, text) not in self._reported:
                self._reported.add((judge, text))
                self.found.append(Violation(round(self.now_s(), 1), judge, text))

    def record_fault(self, name: str) -> None:
        """Record a fault of a node (`node-a`), its disk (`disk node-a`), …"""
        with self._lock:
            self._faults[name] = self.now_s()

    def _had_no_fault(self, name: str, since_s: float) -> bool:
        return self._faults.get(name, -inf) < since_s

    # --- answers -----------------------------------------------------------------------------

    def check_words(self, agent: str, secret: str, text: str, *, is_whole: bool) -> None:
        """Check the words of an answer, or of the part received before its stream broke."""
        answer = text.strip()
        if is_whole:
            self.answers_count += 1
        if is_whole and not answer.startswith(secret):
            self.fail("right answers", f"{agent}: {answer[:60]!r}, not {secret!r}")
        elif not is_whole and not (secret.startswith(answer) or answer.startswith(secret)):
            self.fail("right answers", f"{agent}: a part is {answer[:60]!r}, not of {secret!r}")

    def check_turn(self, agent: str, ack: Ack, cached: int) -> None:
        """Check the epoch of a complete answer, and its reuse of the answer before."""
        with self._lock:
            before = self._acks.get(agent)
            self._acks[agent] = ack
        if before is None:
            return
        if ack.epoch < before.epoch and self._had_no_fault("router", ack.at_s - EXEMPT_S):
            self.fail("epochs", f"{agent}: epoch {ack.epoch} after {before.epoch}")
        self.judged_count += 1
        if cached < KEPT_SHARE * before.tokens and not self._is_excused(before, ack):
            self.fail(
                "memory",
                f"{agent}: {cached} of {before.tokens} tokens on {ack.node}@{ack.epoch},"
                f" acknowledged by {before.node}@{before.epoch}",
            )

    def _is_excused(self, before: Ack, ack: Ack) -> bool:
        """Return whether a fault of the disk, node or router excuses the loss of the memory."""
        if not self._had_no_fault(f"disk {before.node}", before.at_s):
            return True
        was_lost = not self._had_no_fault(before.node, before.at_s)
        was_lost = was_lost or not self._had_no_fault("router", before.at_s)
        return was_lost and (ack.node, ack.epoch) != (before.node, before.epoch)

    def forget(self, agent: str) -> None:
        """Drop the acknowledgements of an erased agent."""
        with self._lock:
            self._acks.pop(agent, None)

    # --- owners ------------------------------------------------------------------------------

    def check_owners(self, nodes: Path) -> int:
        """Check that each epoch has one owner on all disks; return the number of records."""
        claims: dict[tuple[str, str, int], set[str]] = defaultdict(set)
        count = 0
        for node, record in records(nodes):
            count += 1
            is_claim = record.state is not OwnerState.REPLICA and record.owner == node
            if is_claim and not record.tenant.startswith("_"):
                claims[record.tenant, record.agent, record.epoch].add(node)
        for (_, agent, epoch), owners in claims.items():
            if len(owners) > 1:
                self.fail("owners", f"{sorted(owners)} own {agent} at epoch {epoch}")
        return count

    def check_listed(self, rows: list[dict], erased: set[str]) -> None:
        """Check that a list has no erased agent and no node that is both owner and replica."""
        for row in rows:
            if row["id"] in erased:
                self.fail("erased", f"{row['id']} is listed on {row['owner']} again")
            if row["owner"] in row["replicas"]:
                self.fail("owners", f"{row['owner']} is owner and replica of {row['id']}")
        names = [row["id"] for row in rows]
        for name in {name for name in names if names.count(name) > 1}:
            self.fail("owners", f"{name} is listed twice")

    # --- leftovers -----------------------------------------------------------------------------

    def check_erased(self, folder: Path, words: set[str]) -> None:
        """Check that no file below a folder has words of an erased agent."""
        forms = [(word, word.encode()) for word in sorted(words)]
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or path.is_symlink():
                continue
            try:
                raw = path.read_bytes()
            except OSError:
                continue
            for word, form in forms:
                if form in raw:
                    self.fail("erased", f"{word} is in {path.relative_to(folder)}")

    def check_growth(self, before: dict[str, dict], after: dict[str, dict]) -> None:
        """Check that the resources held by each kind of process do not grow."""
        for kind, limits in GROWTH_MAX.items():
            for what, most in limits.items():
                grown = after.get(kind, {}).get(what, 0) - before.get(kind, {}).get(what, 0)
                if grown > most:
                    self.fail("growth", f"{kind}: {grown} more {what}")


GROWTH_MAX = {
    "router": {"descriptors": 48, "threads": 24, "mebibytes": 192},
    "node": {"descriptors": 64, "threads": 24, "mebibytes": 384},
}


def records(nodes: Path) -> list[tuple[str, Manifest]]:
    """Read every sound record of every node's disk."""
    found = []
    for path in sorted(nodes.glob("*/*/manifests/*.mf")):
        try:
            found.append((path.relative_to(nodes).parts[0], decode_manifest(path.read_bytes())))
        except (OSError, CorruptDataError):
            continue  # being replaced, or damaged on purpose
    return found
