"""Report of a folder check, for people and as JSON."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from fabric.codec import to_plain
from node.limits import FSCK_FINDINGS_MAX


class Severity(StrEnum):
    """Severity of a finding."""

    PROBLEM = "problem"  # something is lost or wrong
    LEFTOVER = "leftover"  # ordinary after a crash: the node's next start removes it
    NOTE = "note"  # needs no action


class Kind(StrEnum):
    """Kind of a finding."""

    DAMAGED_BLOCK = "damaged block"
    DAMAGED_RECORD = "damaged record"
    MISPLACED_RECORD = "misplaced record"  # sound, under another agent's name
    FOREIGN_RECORD = "foreign record"  # record of another model
    SHORT_RECORD = "short record"  # some of its blocks are missing, damaged or misnamed
    DAMAGED_SPEC = "damaged spec"
    NOT_A_FILE = "not a file"  # a link, a pipe or a folder where a file belongs
    WRONG_MODE = "wrong mode"
    WRONG_KEY = "wrong key"
    UNREADABLE = "unreadable"
    UNREFERENCED_BLOCK = "unreferenced block"
    TEMPORARY = "temporary"
    NO_SPEC = "no spec"
    NO_KEY = "no key"
    QUARANTINED = "quarantined"
    STRANGE = "strange"


_SEVERITIES: Final = {
    Kind.UNREFERENCED_BLOCK: Severity.LEFTOVER,
    Kind.TEMPORARY: Severity.LEFTOVER,
    Kind.NO_SPEC: Severity.NOTE,
    Kind.NO_KEY: Severity.NOTE,
    Kind.QUARANTINED: Severity.NOTE,
    Kind.STRANGE: Severity.NOTE,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding: its place, its kind, and whether it was repaired."""

    kind: Kind
    file: str  # path from the folder's root; names are digests
    detail: str
    repaired: bool = False

    @property
    def severity(self) -> Severity:
        """Severity that its kind implies."""
        return _SEVERITIES.get(self.kind, Severity.PROBLEM)


@dataclass(slots=True)
class FolderReport:
    """One folder's check."""

    node: str
    folder: str
    model: str | None = None
    fingerprint: str | None = None
    records_count: int = 0
    blocks_count: int = 0
    block_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    left_out: Counter[Severity] = field(default_factory=Counter)  # findings beyond the limit

    def add(self, kind: Kind, file: str, detail: str, *, repaired: bool = False) -> None:
        """Add a finding; beyond the limit it is only counted."""
        finding = Finding(kind, _printable(file), _printable(detail), repaired)
        if len(self.findings) < FSCK_FINDINGS_MAX:
            self.findings.append(finding)
        elif not repaired:
            self.left_out[finding.severity] += 1

    def count(self, severity: Severity) -> int:
        listed_count = sum(f.severity is severity and not f.repaired for f in self.findings)
        return listed_count + self.left_out[severity]

    @property
    def is_sound(self) -> bool:
        return not self.count(Severity.PROBLEM)

    def to_json(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "folder": self.folder,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "records": self.records_count,
            "blocks": self.blocks_count,
            "bytes": self.block_bytes,
            "sound": self.is_sound,
            "problems_left": self.count(Severity.PROBLEM),
            "leftovers_left": self.count(Severity.LEFTOVER),
            "findings": [{**to_plain(f), "severity": f.severity.value} for f in self.findings],
            "findings_left_out": self.left_out.total(),
        }

    def lines(self) -> Iterator[str]:
        about = f" of {_printable(self.model)}" if self.model else ""
        yield (
            f"{self.node}/{self.folder}{about}: {_counted(self.records_count, 'record')}, "
            f"{_counted(self.blocks_count, 'block')}, {self.block_bytes:,} bytes: {self._verdict()}"
        )
        for finding in self.findings:
            done = " (repaired)" if finding.repaired else ""
            yield f"  {finding.severity}: {finding.kind} {finding.file}: {finding.detail}{done}"
        if self.left_out:
            yield f"  and {self.left_out.total()} more"

    def _verdict(self) -> str:
        problems, leftovers = self.count(Severity.PROBLEM), self.count(Severity.LEFTOVER)
        repaired = sum(finding.repaired for finding in self.findings)
        parts = [_counted(problems, "problem") if problems else "sound"]
        parts += [_counted(leftovers, "leftover")] if leftovers else []
        parts += [f"{repaired} repaired"] if repaired else []
        return ", ".join(parts)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _printable(text: str) -> str:
    """Escape characters that a terminal or an encoder cannot show."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
