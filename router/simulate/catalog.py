"""Workloads and policies by name: the shipped placement, its alternatives, and baselines."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Final

from fabric.errors import RejectedError
from router.placement.choice import Policy
from router.placement.placement import Placement
from router.simulate.agent_loops import AGENT_LOOPS
from router.simulate.baselines import (
    DynamoLinear,
    LeastLoad,
    NoMoves,
    PrefixOnly,
    RoundRobin,
    Sticky,
)
from router.simulate.owner_always import OwnerAlways
from router.simulate.shared_beginnings import SHARED_BEGINNINGS
from router.simulate.workload import Workload

WORKLOADS: Final = MappingProxyType(
    {
        workload.name: workload
        for workload in sorted((*AGENT_LOOPS, *SHARED_BEGINNINGS), key=lambda each: each.name)
    }
)


def find_workload(name: str) -> Workload:
    """Return a workload; raise RejectedError for an unknown name."""
    workload = WORKLOADS.get(name.upper())
    if workload is None:
        near = get_close_matches(name.upper(), list(WORKLOADS), n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(WORKLOADS)}"
        message = f"no workload is called {name!r}; {hint}"
        raise RejectedError(message, code="unknown_workload")
    return workload


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """Model of a policy: its placement, and the behaviour of its router and nodes."""

    placement: Callable[[], Placement]
    waits_for_heads: bool = True  # prompts wait for beginnings that others compute on their node
    lends_heads: bool = False  # nodes send each other beginnings that they have or compute
    follows_prompts: bool = True  # the router knows prompts on their way, and nodes' progress


SHIPPED: Final = Policy.SECONDS.value  # what a fabric runs without any option
TUNED: Final = "dynamo-tuned"  # the best of all scales, for each workload and load
OWNER_ALWAYS: Final = "owner-always"  # as this router was before its turns moved agents
DYNAMO_SCALES: Final = (1, 4, 16, 64, 256)
TUNED_FROM: Final = tuple(f"dynamo-{scale}" for scale in DYNAMO_SCALES)
COMPARED: Final = (
    *(SHIPPED, "seconds-no-moves", OWNER_ALWAYS, "sticky", "least-load", "round-robin"),
    *("prefix-only", TUNED_FROM[0], TUNED),
)

_POLICIES: Final = MappingProxyType[str, PolicyModel](
    {
        SHIPPED: PolicyModel(Placement, lends_heads=True),
        "seconds-no-moves": PolicyModel(NoMoves, lends_heads=True),
        "seconds-no-loans": PolicyModel(Placement),
        "router-least-load": PolicyModel(partial(Placement, Policy.LEAST_LOAD), lends_heads=True),
        "router-round-robin": PolicyModel(partial(Placement, Policy.ROUND_ROBIN), lends_heads=True),
        OWNER_ALWAYS: PolicyModel(OwnerAlways, waits_for_heads=False, follows_prompts=False),
        "sticky": PolicyModel(Sticky),
        "least-load": PolicyModel(LeastLoad),
        "round-robin": PolicyModel(RoundRobin),
        "prefix-only": PolicyModel(PrefixOnly),
        **{f"dynamo-{n}": PolicyModel(partial(DynamoLinear, n)) for n in DYNAMO_SCALES},
    }
)


def policy_names() -> list[str]:
    """List all policies."""
    return [*_POLICIES, TUNED]


def find_policy(name: str) -> PolicyModel:
    """Return a policy; raise RejectedError for an unknown name."""
    policy = _POLICIES.get(name)
    if policy is None:
        near = get_close_matches(name, policy_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(policy_names())}"
        message = f"no policy is called {name!r}; {hint}"
        raise RejectedError(message, code="unknown_policy")
    return policy
