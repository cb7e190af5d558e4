"""Settings of an agent as a whole, besides its pin; part of its record."""

from dataclasses import dataclass, replace

from fabric.limits import DECAY_S_MAX


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of one agent. All but `is_private` end with the agent's next turn."""

    rebuilds: bool = False  # its next turn recomputes what was kept after edits
    is_closed: bool = False  # it is finished: evict it first when others need room
    decays_after_s: float | None = None  # once idle for so long, evict it before others
    is_private: bool = False  # no other agent of its tenant may reuse its cache

    def problem(self) -> str | None:
        """Return why the settings are invalid; None if they are valid."""
        after_s = self.decays_after_s
        if after_s is not None and not 0 <= after_s <= DECAY_S_MAX:
            return "it decays after no time"
        return None

    def after_turn(self) -> "AgentSettings | None":
        """Return the settings that a turn leaves."""
        return unless_default(AgentSettings(is_private=self.is_private))

    def of_fork(self) -> "AgentSettings | None":
        """Return the settings of a new agent with the same cache: its worth starts anew."""
        return unless_default(replace(self, is_closed=False, decays_after_s=None))

    def is_spent(self, idle_s: float) -> bool:
        """Return whether an agent that has been idle for so long is evicted before others."""
        return self.is_closed or (self.decays_after_s is not None and idle_s >= self.decays_after_s)


def is_spent(settings: AgentSettings | None, idle_s: float) -> bool:
    """Return whether an agent with these settings, if any, is evicted before others."""
    return settings is not None and settings.is_spent(idle_s)


def unless_default(settings: AgentSettings) -> AgentSettings | None:
    """Return the settings, or None if all are the defaults."""
    return None if settings == AgentSettings() else settings
