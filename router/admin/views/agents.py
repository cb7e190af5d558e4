"""JSON views of agents, their copies, edits, settings and erasure receipts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fabric.codec import to_plain
from fabric.control.directive_calls import MemoryView
from fabric.control.node_calls import AgentView, TierBytes
from fabric.ids import AgentId, AgentKey
from fabric.record.manifest import AgentSettings, OwnerState
from router.admin.views.shape import AnswerShape, Row
from router.api.openapi import array, one_of, text
from router.fleet.directory import Holding
from router.fleet.fleet import Fleet
from router.http.refusals import refuse
from router.moves.erasures import Erasure

SETTINGS_TYPES: Final[dict[str, Any]] = {
    "rebuilds": bool,
    "closed": bool,
    "decays_after_s": float | None,
    "share": one_of("tenant", "agent"),
}
AGENT_DIRECTIVES: Final = AnswerShape(
    AgentView,
    "agent.directives",
    "node",
    "directives",
    id="agent",
    beside={"operation": str | None},
)
MEMORY: Final = AnswerShape(
    MemoryView,
    "agent.memory",
    "tokens",
    "messages",
    "directives",
    "undone",
    beside={"id": AgentId, "node": str},
)
REBUILD: Final = AnswerShape(
    AgentView, "agent.rebuild", "node", "exact_tokens", id="agent", beside={"rebuilds": bool}
)
AGENT_SETTINGS: Final = AnswerShape(
    AgentView, "agent.wishes", "node", "tiers", "pinned", id="agent", beside=SETTINGS_TYPES
)


def settings_row(view: AgentView) -> Row:
    """Return the settings that clients chose for an agent, as a JSON row."""
    settings = view.settings or AgentSettings()
    return {
        "rebuilds": settings.rebuilds,
        "closed": settings.is_closed,
        "decays_after_s": settings.decays_after_s,
        "share": "agent" if settings.is_private else "tenant",
    }


def agent_settings_row(view: AgentView) -> Row:
    """Show the settings, and which tiers hold the agent's memory."""
    return AGENT_SETTINGS.row(view, **settings_row(view))


def rebuild_row(view: AgentView) -> Row:
    """Return whether an agent's next turn recomputes its memory, and from which token on."""
    return REBUILD.row(view, rebuilds=view.settings is not None and view.settings.rebuilds)


ERASING = "erasing"  # not served any more; a node that was not reached still has its bytes


_TIERS: Final = array(one_of("hot", "disk"))
_COPY: Final = AnswerShape(
    AgentView,
    None,
    "revision",
    "tokens",
    "kept",
    "bytes",
    beside={"node": str, "epoch": int, "current": bool, "tiers": _TIERS},
)
AGENT: Final = AnswerShape(
    AgentView,
    "agent",
    "revision",
    "tokens",
    "blocks",
    "bytes",
    "durable",
    "last_match",
    "pinned",
    "pin_held",
    "exact_tokens",
    "edits",
    "directives",
    id="agent",
    beside={
        "alias": str,  # as logs call it
        "owner": str | None,
        "state": str,
        "epoch": int,
        "group": str | None,
        "busy": bool,
        "tiers": _TIERS,
        "created_s": float | None,
        "used_s": float | None,
        "replicas": array(text()),
        "erasing": array(text()),
        "copies": array(_COPY.schema()),
        "amortized": bool,
        "branches": int,
        **SETTINGS_TYPES,
    },
)
PIN: Final = AnswerShape(AgentView, "agent.pin", "node", "pinned", "pin_held", id="agent")


_TIER_NAMES: Final = ("hot", "disk")


@dataclass(frozen=True, slots=True)
class AgentFilter:
    """Filter of a list of agents: by owner, or by tier at the owner."""

    node: str | None = None
    tier: str | None = None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "AgentFilter":
        """Return the filter of a query; raise RejectedError for an unknown tier."""
        tier = query.get("tier")
        if tier is not None and tier not in _TIER_NAMES:
            refuse("tier", f"expected one of {', '.join(_TIER_NAMES)}")
        return cls(query.get("node"), tier)

    def matches(self, fleet: Fleet, key: AgentKey) -> bool:
        """Return whether the filter accepts an agent."""
        if self.node is None and self.tier is None:
            return True
        owner = fleet.directory.owner(key)
        if owner is None or (self.node is not None and owner.node != self.node):
            return False
        return self.tier is None or (owner.view is not None and self.tier in owner.view.tiers)


def agent_row(fleet: Fleet, key: AgentKey) -> Row:
    """Show an agent that some node holds, as its owner describes it."""
    directory = fleet.directory
    owner = directory.owner(key)
    holdings = directory.holdings(key)
    chosen: Holding = owner or max(holdings, key=lambda holding: holding.epoch)
    reported, view = chosen.view, _view(key, chosen)
    current = directory.unerased_holdings(key)
    replicas = [holding for holding in current if holding.state is OwnerState.REPLICA]
    return AGENT.row(
        view,
        alias=fleet.alias(key),
        owner=owner.node if owner else None,
        state=chosen.state.value if current else ERASING,
        epoch=chosen.epoch,
        group=chosen.group,
        busy=view.busy,
        tiers=view.tiers,
        created_s=reported.created_s if reported else None,
        used_s=reported.used_s if reported else None,
        replicas=[holding.node for holding in replicas],
        erasing=directory.erasing_nodes(key),
        copies=[_copy_row(key, holding, owner) for holding in replicas],
        amortized=view.exact_tokens is not None,
        branches=view.branches or 0,
        **settings_row(view),
    )


def _copy_row(key: AgentKey, holding: Holding, owner: Holding | None) -> Row:
    view = _view(key, holding)
    is_current = owner is not None and holding.is_current(owner)
    return _COPY.row(
        view, node=holding.node, epoch=holding.epoch, current=is_current, tiers=view.tiers
    )


def _view(key: AgentKey, holding: Holding) -> AgentView:
    """Return a node's description of an agent, or an empty one until the node has sent it."""
    unseen = AgentView(
        *key, None, holding.node, holding.state, holding.epoch, revision=0, tokens=0, blocks=0,
        bytes=TierBytes(0, 0), tiers=(), busy=True, created_s=0.0, used_s=0.0,
    )  # fmt: skip
    return holding.view or unseen


def erasure_row(erasure: Erasure, quoting_runs: Sequence[str], removed_runs: Sequence[str]) -> Row:
    """Return the removed parts, the disks with tombstones, and the runs that quote the agent."""
    receipts = [to_plain(receipt) for receipt in erasure.receipts if receipt.existed]
    for receipt in receipts:
        del receipt["tombstone"]  # internal to the nodes
    other_models = [receipt["other_models"] for receipt in receipts]
    blocks_removed = sum(item["blocks_removed"] for item in receipts)
    bytes_removed = sum(item["bytes_removed"] for item in receipts)
    return {
        "id": erasure.agent,
        "object": "agent.deleted",
        "deleted": not erasure.unreachable,
        "receipts": receipts,
        "blocks_removed": blocks_removed + sum(counts["blocks"] for counts in other_models),
        "bytes_removed": bytes_removed + sum(counts["bytes"] for counts in other_models),
        "blocks_kept_shared": sum(item["blocks_kept_shared"] for item in receipts),
        "derived_agents": sum(item["derived_agents"] for item in receipts),
        "derived_tokens": sum(item["derived_tokens"] for item in receipts),
        "quoting_runs": list(quoting_runs),
        "removed_runs": list(removed_runs),
        "unreachable": list(erasure.unreachable),
        # Nodes with a tombstone on disk, which they pass on to nodes that were away.
        "remembered": [r.node for r in erasure.receipts if r.tombstone is not None],
    }
