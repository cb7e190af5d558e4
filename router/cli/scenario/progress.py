"""Progress of a run: a bar on a terminal, lines elsewhere."""

from collections.abc import Callable
from types import TracebackType

from router.cli.output import Steps
from router.cli.terminal import ProgressBar, errors_are_terminal, start_bar
from router.scenario.run_events import (
    AgentAsked,
    AgentCopied,
    AgentSpoke,
    PhaseBegan,
    PhaseEnded,
    RunEvent,
    StepTaken,
    Waited,
)


class RunProgress:
    """Display of one arm's events."""

    def __init__(self, turns_total: int, title: str, *, is_quiet: bool = False) -> None:
        self._total = turns_total
        self._done = 0
        self._title = title
        self._steps = Steps(quiet=is_quiet)
        self._bar: ProgressBar | None = None
        self._has_bar = errors_are_terminal() and not is_quiet

    def __enter__(self) -> Callable[[RunEvent], None]:
        if self._has_bar:
            self._bar = start_bar(self._title, self._total)
        return self.show

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, event: RunEvent) -> None:
        """Update the display by an event."""
        if isinstance(event, AgentSpoke):
            self._done += 1
        text = _line(event)
        if self._bar is not None:
            line = f"{self._title}: {text}" if text else self._title
            self._bar.update(self._done, line[:72])
        elif text:
            self._steps.say(f"{self._done}/{self._total} {text}")


def _line(event: RunEvent) -> str:
    if isinstance(event, PhaseBegan):
        return f"{event.phase} begins"
    if isinstance(event, AgentAsked):
        return f"{event.turn.phase}: {event.turn.speaker} is asked"
    if isinstance(event, StepTaken):
        names = ", ".join(call.name for call in event.step.calls)
        return f"{event.turn.phase}: {event.turn.speaker} calls {names}"
    if isinstance(event, AgentSpoke):
        figures, turn = event.figures, event.utterance
        return (
            f"{turn.phase}: {turn.speaker} on {figures.node}, "
            f"first token after {figures.ttft_s:.2f} s, "
            f"{figures.cached_tokens:,} of {figures.prompt_tokens:,} tokens cached "
            f"({figures.cache})"
        )
    if isinstance(event, AgentCopied):
        how = "moves" if event.source is None else f"is forked from {event.source}"
        return f"{event.phase}: {event.agent} {how}, to {event.copied.node}"
    if isinstance(event, Waited):
        return f"{event.what}: {event.why}"
    if isinstance(event, PhaseEnded):
        met_count = sum(verdict.holds for verdict in event.verdicts)
        return f"{event.phase} has ended, {met_count} of {len(event.verdicts)} expectations hold"
    return f"{event.phase}: the memory of {event.agent} is edited"
