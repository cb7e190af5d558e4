"""Workloads and policies by name: the shipped placement, its alternatives, and baselines."""

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Final

from fabric.errors import RejectedError
from router.placement.placement import Placement
from router.placement.seconds import Policy
from router.simulate.agent_loops import AGENT_LOOPS
from router.simulate.baselines import (
    DynamoLinear,
    LeastLoad,
    NoMoves,
    PrefixOnly,
    RoundRobin,
    Sticky,
)
from router.simulate.shared_beginnings import SHARED_BEGINNINGS
from router.simulate.workload import Workload

WORKLOADS: Final = MappingProxyType(
    {
        workload.name: workload
        for workload in sorted((*AGENT_LOOPS, *SHARED_BEGINNINGS), key=lambda each: each.name)
    }
)


def workload_named(name: str) -> Workload:
    """Return a workload; raise RejectedError for an unknown name."""
    workload = WORKLOADS.get(name.upper())
    if workload is None:
        near = get_close_matches(name.upper(), list(WORKLOADS), n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(WORKLOADS)}"
        message = f"no workload is called {name!r}; {hint}"
        raise RejectedError(message, code="unknown_workload")
    return workload


SHIPPED: Final = Policy.SECONDS.value  # what a fabric runs without any option
TUNED: Final = "dynamo-tuned"  # the best of all scales, for each workload and load
DYNAMO_SCALES: Final = (1, 4, 16, 64, 256)
TUNED_FROM: Final = tuple(f"dynamo-{scale}" for scale in DYNAMO_SCALES)
COMPARED: Final = (
    *(SHIPPED, "seconds-no-moves", "sticky", "least-load", "round-robin", "prefix-only"),
    *(TUNED_FROM[0], TUNED),
)

_MAKERS: Final = MappingProxyType[str, Callable[[], Placement]](
    {
        SHIPPED: Placement,
        "seconds-no-moves": NoMoves,
        "router-least-load": partial(Placement, Policy.LEAST_LOAD),
        "router-round-robin": partial(Placement, Policy.ROUND_ROBIN),
        "sticky": Sticky,
        "least-load": LeastLoad,
        "round-robin": RoundRobin,
        "prefix-only": PrefixOnly,
        **{f"dynamo-{scale}": partial(DynamoLinear, scale) for scale in DYNAMO_SCALES},
    }
)


def policy_names() -> list[str]:
    """List all policies."""
    return [*_MAKERS, TUNED]


def placement_of(name: str) -> Placement:
    """Return a new placement; raise RejectedError for an unknown name."""
    maker = _MAKERS.get(name)
    if maker is None:
        near = get_close_matches(name, policy_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(policy_names())}"
        message = f"no policy is called {name!r}; {hint}"
        raise RejectedError(message, code="unknown_policy")
    return maker()
