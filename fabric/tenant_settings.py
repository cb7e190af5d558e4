"""Settings of single tenants: shares of RAM and disk, weights, limits of turns and tokens.

Rules are (holds, setting, what it must be), as `fabric/settings.py` reports them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from fabric.errors import RejectedError
from fabric.ids import SELF_TEST_TENANT, TenantId, parse_tenant_id
from fabric.limits import TENANT_SHARES_MAX, TENANT_WEIGHT_MAX, TENANT_WEIGHT_MIN
from fabric.retention import TenantShare

Rule: TypeAlias = tuple[bool, str, str]
SHARES: Final = "node.tenants"
WEIGHTS: Final = "router.tenant_weights"
LIMITS: Final = "router.tenant_limits"
_TENANTS_MAX: Final = f"must name at most {TENANT_SHARES_MAX} tenants"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of one tenant in the whole fabric; None: no limit of its own."""

    turns: int | None = None  # that run or wait at once
    tokens_per_minute: int | None = None  # computed: uncached prompt tokens and answer tokens


def parse_tenant(name: object) -> TenantId:
    """Return a tenant's name; raise RejectedError if it is invalid, or that of self-tests."""
    tenant = parse_tenant_id(name)
    if tenant == SELF_TEST_TENANT:
        message = "this name is reserved for the self-tests of nodes"
        raise RejectedError(message)
    return tenant


def share_rules(tenants: Mapping[str, TenantShare]) -> Iterator[Rule]:
    """Yield the rules of tenants' shares of RAM and disk."""
    yield len(tenants) <= TENANT_SHARES_MAX, SHARES, _TENANTS_MAX
    for tenant, share in tenants.items():
        where = f"{SHARES}.{tenant}"
        floor = share.floor if share.floor is not None else 0.0
        has_room = share.disk_bytes is None or share.disk_bytes > 0
        yield 0 < share.quota <= 1, f"{where}.quota", "must be over 0 and at most 1"
        yield (
            0 <= floor <= share.quota,
            f"{where}.floor",
            "must be between 0 and the tenant's quota",
        )
        yield has_room, f"{where}.disk_bytes", "must be over 0"
    total = sum(share.floor or 0 for share in tenants.values())
    yield total <= 1, SHARES, "the floors of all tenants together must be at most 1"


def weight_rules(weights: Mapping[str, float]) -> Iterator[Rule]:
    """Yield the rules of tenants' weights in the router's queues."""
    yield len(weights) <= TENANT_SHARES_MAX, WEIGHTS, _TENANTS_MAX
    for tenant, weight in weights.items():
        is_weight = TENANT_WEIGHT_MIN <= weight <= TENANT_WEIGHT_MAX
        between = f"must be {TENANT_WEIGHT_MIN:g}-{TENANT_WEIGHT_MAX:g}"
        yield is_weight, f"{WEIGHTS}.{tenant}", between


def limit_rules(limits: Mapping[str, TenantLimits]) -> Iterator[Rule]:
    """Yield the rules of tenants' limits."""
    yield len(limits) <= TENANT_SHARES_MAX, LIMITS, _TENANTS_MAX
    for tenant, each in limits.items():
        for name in ("turns", "tokens_per_minute"):
            number = getattr(each, name)
            yield number is None or number >= 1, f"{LIMITS}.{tenant}.{name}", "must be at least 1"
