"""Progress and result of a backup or a restore: a line for each agent, and a summary."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Final, Self

from router.cli.errors import FAILED
from router.cli.output import human_bytes
from router.cli.terminal import ProgressBar, errors_are_terminal, print_json, print_line, start_bar

WRONG: Final = frozenset({"failed", "damaged"})


@dataclass(frozen=True, slots=True)
class AgentResult:
    """Outcome for one agent."""

    tenant: str | None
    id: str
    result: str  # saved, kept, restored, replaced, skipped, sound, failed or damaged
    bytes: int = 0
    node: str | None = None
    why: str | None = None

    @property
    def name(self) -> str:
        """Name for people, with the tenant's unless it is the usual one."""
        return self.id if self.tenant in (None, "default") else f"{self.tenant}/{self.id}"


class Results:
    """Outcomes so far, shown as they come."""

    def __init__(self, label: str, total: int, *, as_json: bool) -> None:
        self._as_json = as_json
        self._label, self._total = label, total
        self._bar: ProgressBar | None = None
        self.rows: list[AgentResult] = []

    def __enter__(self) -> Self:
        if not self._as_json and errors_are_terminal():
            self._bar = start_bar(self._label, self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, row: AgentResult) -> None:
        """Note and show an outcome."""
        self.rows.append(row)
        if self._bar is not None:
            self._bar.update(len(self.rows), f"{self._label} {row.name}")
        if not self._as_json:
            why = f"  {row.why}" if row.why else ""
            size = f"  {human_bytes(row.bytes)}" if row.bytes else ""
            print_line(f"{row.result:8}  {row.name}{size}{why}", flush=True)

    @property
    def counts(self) -> dict[str, int]:
        """Number of agents by result."""
        return dict(sorted(Counter(row.result for row in self.rows).items()))

    @property
    def has_failed(self) -> bool:
        """Whether an agent failed."""
        return any(row.result in WRONG for row in self.rows)

    def report(self, summary: dict[str, Any], lines: Iterable[str], *, is_whole: bool) -> int:
        """Print the summary; return the exit status, 0 if everything is there."""
        status = 0 if is_whole and not self.has_failed else FAILED
        if self._as_json:
            agents = [asdict(row) for row in self.rows]
            print_json({**summary, "ok": status == 0, "counts": self.counts, "agents": agents})
            return status
        counted = ", ".join(f"{count} {result}" for result, count in self.counts.items())
        print_line(f"{counted or 'no agents'}; {human_bytes(sum(r.bytes for r in self.rows))}")
        for line in lines:
            print_line(line)
        return status
