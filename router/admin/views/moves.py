"""What moves, copies, loads and files took, as JSON."""

from fabric.codec import to_plain
from fabric.control.hibernation_calls import Resumed
from fabric.control.node_calls import AgentView
from fabric.ids import AgentId
from router.admin.views.row import Row
from router.moves.copier import CopyReceipt
from router.moves.migration import MigrationReceipt


def migration_row(receipt: MigrationReceipt) -> Row:
    """Show what a move took."""
    return {
        "id": receipt.agent,
        "from": receipt.source,
        "to": receipt.target,
        "epoch": receipt.epoch,
        "blocks_sent": receipt.blocks_sent,
        "blocks_reused": receipt.blocks_reused,
        "bytes_sent": receipt.bytes_sent,
        "seconds": receipt.seconds,
        "pause_seconds": receipt.pause_seconds,
    }


def fork_row(name: AgentId, parent: AgentId, receipt: CopyReceipt) -> Row:
    """Show a fork, and what the copy took."""
    return {
        "id": name,
        "object": "agent.fork",
        "forked_from": parent,
        "node": receipt.target,
        "epoch": receipt.view.epoch,
        "tokens": receipt.view.tokens,
        **_cost(receipt),
    }


def replica_row(receipt: CopyReceipt) -> Row:
    """Show a replica, and what the copy took."""
    view = receipt.view
    return {
        "id": receipt.agent,
        "object": "agent.replica",
        "owner": receipt.source,
        "node": receipt.target,
        "epoch": view.epoch,
        "revision": view.revision,
        "tokens": view.tokens,
        "kept": view.kept,
        **_cost(receipt),
    }


def prefetch_row(view: AgentView) -> Row:
    """Show in which tiers an agent is behind a load, or the end of one."""
    return {
        "id": view.agent,
        "object": "agent.prefetch",
        "node": view.node,
        "tiers": list(view.tiers),
        "tokens": view.tokens,
        "bytes": to_plain(view.bytes),
    }


def resumed_row(resumed: Resumed, model: str) -> Row:
    """Show an agent that came from a file, and what that took."""
    view = resumed.view
    return {
        "id": view.agent,
        "object": "agent.resumed",
        "node": view.node,
        "epoch": view.epoch,
        "tokens": view.tokens,
        "model": model,
        "blocks_received": resumed.blocks_received,
        "blocks_reused": resumed.blocks_reused,
        "bytes_received": resumed.bytes_received,
    }


def _cost(receipt: CopyReceipt) -> Row:
    return {
        "blocks_sent": receipt.blocks_sent,
        "blocks_reused": receipt.blocks_reused,
        "bytes_sent": receipt.bytes_sent,
        "seconds": receipt.seconds,
    }
