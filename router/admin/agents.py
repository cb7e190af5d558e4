"""GET, DELETE, pin and migrate for agents; each tenant sees its own."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.codec import to_plain
from fabric.control.node_calls import AgentView, PinAgent
from fabric.ids import AgentKey
from fabric.record.manifest import OwnerState
from router.fleet.directory import Holding
from router.fleet.fleet import Fleet
from router.http.auth import agent_key, tenant_of
from router.http.fields import Fields, require_text
from router.http.json_body import read_object
from router.moves.erasures import Erasure, Erasures
from router.moves.migrations import Migrations
from router.moves.move_candidates import is_current

ERASING = "erasing"  # nobody is served with it; a node that was not reached has bytes of it yet


class AgentsApi:
    """Agents as the nodes describe them at the moment of asking."""

    def __init__(self, fleet: Fleet, migrations: Migrations, erasures: Erasures) -> None:
        self._fleet = fleet
        self._migrations = migrations
        self._erasures = erasures

    def routes(self) -> list[Route]:
        return [
            Route("/v1/agents", self.index, methods=["GET"]),
            Route("/v1/agents/{agent}", self.show, methods=["GET"]),
            Route("/v1/agents/{agent}", self.erase, methods=["DELETE"]),
            Route("/v1/agents/{agent}/migrate", self.migrate, methods=["POST"]),
            Route("/v1/agents/{agent}/pin", self.pin, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        """List the tenant's agents, as far as the nodes have told theirs."""
        self._fleet.meeting.require_nodes()
        await self._fleet.membership.refresh(relist=True)
        tenant = tenant_of(request)
        directory = self._fleet.directory
        agents = [_agent((tenant, agent), self._fleet) for agent in directory.agents(tenant)]
        unheard = list(self._fleet.membership.unheard())
        unmet = self._fleet.meeting.unmet
        told = {"complete": not unheard and not unmet, "unheard": unheard, "unmet": unmet}
        return JSONResponse({"object": "list", "data": agents, **told})

    async def show(self, request: Request) -> Response:
        key = agent_key(request)
        await self._fleet.membership.refresh(relist=True)
        if not self._fleet.directory.holdings(key):
            raise self._fleet.meeting.unknown_agent(key[1])
        return JSONResponse(_agent(key, self._fleet))

    async def erase(self, request: Request) -> Response:
        erasure = await self._erasures.erase(*agent_key(request))
        return JSONResponse(_erased(erasure))

    async def pin(self, request: Request) -> Response:
        """Let an agent be evicted last, or, with `pinned` false, like any other."""
        key = agent_key(request)
        fields = Fields(await read_object(request))
        fields.require("pinned")
        pinned = fields.flag("pinned")
        await self._fleet.membership.refresh(relist=True)
        owner = self._fleet.require_owner(key)
        view = await self._fleet.link(owner.node).call(PinAgent(*key, pinned), AgentView)
        return JSONResponse(
            {
                "id": key[1],
                "object": "agent.pin",
                "node": owner.node,
                "pinned": view.pinned,
                "pin_held": view.pin_held,
            }
        )

    async def migrate(self, request: Request) -> Response:
        """Move an agent to the node named by `to`; answers when it is committed."""
        tenant, agent = agent_key(request)
        fields = Fields(await read_object(request))
        target = require_text(fields.require("to"), "to")
        receipt = await self._migrations.migrate(tenant, agent, target)
        return JSONResponse(
            {
                "id": agent,
                "from": receipt.source,
                "to": receipt.target,
                "epoch": receipt.epoch,
                "blocks_sent": receipt.blocks_sent,
                "blocks_reused": receipt.blocks_reused,
                "bytes_sent": receipt.bytes_sent,
                "seconds": receipt.seconds,
                "pause_seconds": receipt.pause_seconds,
            }
        )


def _erased(erasure: Erasure) -> dict[str, Any]:
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
        "unreachable": list(erasure.unreachable),
        # Whose disk holds that it was erased, and so tells whoever was away.
        "remembered": [r.node for r in erasure.receipts if r.tombstone is not None],
    }


def _copy(holding: Holding, owner: Holding | None) -> dict[str, Any]:
    view = holding.view
    return {
        "node": holding.node,
        "epoch": holding.epoch,
        "revision": view.revision if view else 0,
        "tokens": view.tokens if view else 0,
        "current": owner is not None and is_current(holding, owner),
        "kept": view.kept if view else False,
        "tiers": list(view.tiers) if view else [],
        "bytes": to_plain(view.bytes) if view else {"hot": 0, "disk": 0},
    }


def _agent(key: AgentKey, fleet: Fleet) -> dict[str, Any]:
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
        "copies": [_copy(holding, owner) for holding in living if holding.node in replicas],
        "pinned": view.pinned if view else False,
        "pin_held": view.pin_held if view else False,
        "pins": [],
        "directives": [],
    }
