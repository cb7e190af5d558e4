"""Which phases have ended when another one begins."""

from router.scenario.scenario import Scenario


def earlier_phases(scenario: Scenario) -> dict[str, frozenset[str]]:
    """Name for each phase all that have ended when it begins, by themselves or through others."""
    found: dict[str, frozenset[str]] = {}
    for phase in scenario.phases:
        named = tuple(found) if phase.after is None else phase.after
        direct = frozenset(name for name in named if name in found)
        found[phase.id] = direct.union(*(found[name] for name in direct))
    return found
