"""An agent, its copies and what became of it, as JSON."""

from collections.abc import Sequence

from fabric.codec import to_plain
from fabric.control.node_calls import AgentView
from fabric.ids import AgentKey
from fabric.record.manifest import OwnerState
from router.admin.views.directives import wished
from router.admin.views.row import Row
from router.fleet.directory import Holding
from router.fleet.fleet import Fleet
from router.moves.erasures import Erasure

ERASING = "erasing"  # nobody is served with it; a node that was not reached has bytes of it yet


def agent_row(fleet: Fleet, key: AgentKey) -> Row:
    """Show an agent that some node holds, as its owner describes it."""
    directory = fleet.directory
    owner = directory.owner(key)
    holdings = directory.holdings(key)
    chosen: Holding = owner or max(holdings, key=lambda holding: holding.epoch)
    view = chosen.view
    living, erasing = directory.living(key), directory.erasing(key)
    replicas = [h.node for h in living if h.state is OwnerState.REPLICA]
    return {
        "id": key[1],
        "object": "agent",
        "alias": fleet.alias(key),  # as logs call it
        "owner": owner.node if owner else None,
        "state": chosen.state.value if living else ERASING,
        "epoch": chosen.epoch,
        "group": chosen.group,
        "revision": view.revision if view else 0,
        "tokens": view.tokens if view else 0,
        "blocks": view.blocks if view else 0,
        "bytes": to_plain(view.bytes) if view else {"hot": 0, "disk": 0},
        "tiers": list(view.tiers) if view else [],
        "durable": view.durable if view else False,
        "busy": view.busy if view else True,
        "created_s": view.created_s if view else None,
        "used_s": view.used_s if view else None,
        "last_match": to_plain(view.last_match) if view else None,
        "replicas": replicas,
        "erasing": list(erasing),
        "copies": [_copy_row(holding, owner) for holding in living if holding.node in replicas],
        "pinned": view.pinned if view else False,
        "pin_held": view.pin_held if view else False,
        "pins": [],
        "amortized": view is not None and view.exact_tokens is not None,
        "exact_tokens": view.exact_tokens if view else None,
        "edits": to_plain(view.edits) if view else [],
        "directives": to_plain(view.directives) if view else [],
        **wished(view),
    }


def _copy_row(holding: Holding, owner: Holding | None) -> Row:
    view = holding.view
    return {
        "node": holding.node,
        "epoch": holding.epoch,
        "revision": view.revision if view else 0,
        "tokens": view.tokens if view else 0,
        "current": owner is not None and holding.is_current(owner),
        "kept": view.kept if view else False,
        "tiers": list(view.tiers) if view else [],
        "bytes": to_plain(view.bytes) if view else {"hot": 0, "disk": 0},
    }


def pin_row(view: AgentView) -> Row:
    """Show whether an agent's pin counts, by its owner's answer."""
    return {
        "id": view.agent,
        "object": "agent.pin",
        "node": view.node,
        "pinned": view.pinned,
        "pin_held": view.pin_held,
    }


def erasure_row(erasure: Erasure, quoting_runs: Sequence[str], removed_runs: Sequence[str]) -> Row:
    """Show what was removed where, whose disk remembers that, and which runs still quote it."""
    receipts = [to_plain(receipt) for receipt in erasure.receipts if receipt.existed]
    for receipt in receipts:
        del receipt["tombstone"]  # the nodes' own business
    others = [receipt["other_models"] for receipt in receipts]
    blocks_removed = sum(item["blocks_removed"] for item in receipts)
    bytes_removed = sum(item["bytes_removed"] for item in receipts)
    return {
        "id": erasure.agent,
        "object": "agent.deleted",
        "deleted": not erasure.unreachable,
        "receipts": receipts,
        "blocks_removed": blocks_removed + sum(other["blocks"] for other in others),
        "bytes_removed": bytes_removed + sum(other["bytes"] for other in others),
        "blocks_kept_shared": sum(item["blocks_kept_shared"] for item in receipts),
        "derived_agents": sum(item["derived_agents"] for item in receipts),
        "derived_tokens": sum(item["derived_tokens"] for item in receipts),
        "quoting_runs": list(quoting_runs),
        "removed_runs": list(removed_runs),
        "unreachable": list(erasure.unreachable),
        # Whose disk holds that it was erased, and so tells whoever was away.
        "remembered": [r.node for r in erasure.receipts if r.tombstone is not None],
    }
