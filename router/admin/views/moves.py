"""JSON views of the costs of moves, copies, loads and files."""

from typing import Final

from fabric.control.hibernation_calls import Resumed
from fabric.control.node_calls import AgentView
from fabric.ids import AgentId
from router.admin.views.shape import AnswerShape
from router.api.openapi import array, one_of
from router.moves.copier import CopyReceipt
from router.moves.migration import MigrationReceipt

_COST: Final = ("blocks_sent", "blocks_reused", "bytes_sent", "seconds")
MIGRATION: Final = AnswerShape(
    MigrationReceipt,
    None,
    "epoch",
    "pause_seconds",
    *_COST,
    id="agent",
    to="target",
    from_="source",
)
FORK: Final = AnswerShape(
    CopyReceipt,
    "agent.fork",
    *_COST,
    node="target",
    epoch="view.epoch",
    tokens="view.tokens",
    beside={"id": AgentId, "forked_from": AgentId},
)
REPLICA: Final = AnswerShape(
    CopyReceipt,
    "agent.replica",
    *_COST,
    id="agent",
    owner="source",
    node="target",
    epoch="view.epoch",
    revision="view.revision",
    tokens="view.tokens",
    kept="view.kept",
)
PREFETCH: Final = AnswerShape(
    AgentView,
    "agent.prefetch",
    "node",
    "tokens",
    "bytes",
    id="agent",
    beside={"tiers": array(one_of("hot", "disk"))},
)
RESUMED: Final = AnswerShape(
    Resumed,
    "agent.resumed",
    "blocks_received",
    "blocks_reused",
    "bytes_received",
    id="view.agent",
    node="view.node",
    epoch="view.epoch",
    tokens="view.tokens",
    beside={"model": str},
)
