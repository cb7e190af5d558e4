"""The nodes that a turn waits for before admission, shown in its stream."""

from dataclasses import dataclass


@dataclass(slots=True)
class AwaitedNodes:
    """The nodes that may have the turn's agent; none while it waits for nothing."""

    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"waiting for {', '.join(self.nodes)}" if self.nodes else "starting"
