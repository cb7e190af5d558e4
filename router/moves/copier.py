"""Copy of an agent's last saved record to another node: offered, fetched and stored."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from fabric.control.node_calls import AbortMigration, AgentView, Copied, CopyBlocks, Offer
from fabric.control.replica_calls import OfferCopy
from fabric.errors import FabricError, RetryElsewhereError, RetryLaterError
from fabric.hosting.tracing import span
from fabric.ids import AgentId, AgentKey, MigrationId, NodeName
from fabric.net.wire import Urgency
from router.fleet.directory import Holding
from router.fleet.fleet import Fleet
from router.fresh_ids import fresh_migration
from router.limits import COPY_TRIES_MAX
from router.moves.migration import DAMAGED
from router.moves.retries import as_client_error, best_effort_call

# Errors of a block that a turn replaced during the copy.
LOST_BLOCKS = frozenset({"not_found", "block_missing", "blocks_missing"})

Keep = Callable[[MigrationId, bytes], object]  # returns a call of `fabric.control.replica_calls`


@dataclass(frozen=True, slots=True)
class CopyReceipt:
    """Cost of a copy, and the target's report."""

    agent: AgentId
    source: NodeName
    target: NodeName
    view: AgentView
    blocks_sent: int
    blocks_reused: int
    bytes_sent: int
    seconds: float


async def copy_agent(
    fleet: Fleet, key: AgentKey, target: NodeName, keep: Keep, *, background: bool = False
) -> CopyReceipt:
    """Copy an agent's last saved record, and try again if a turn replaces it meanwhile.

    Raises NotFoundError, NodeLostError, or RetryLaterError if the agent keeps changing.
    """
    failure: FabricError = RetryLaterError("the agent keeps changing", code="agent_changing")
    verify = False
    for _ in range(COPY_TRIES_MAX):
        owner = fleet.require_owner(key)
        try:
            return await _attempt(
                fleet, key, owner, target, keep, background=background, verify=verify
            )
        except RetryElsewhereError as error:
            failure = as_client_error(error)  # the directory may be stale
        except FabricError as error:
            if error.code not in LOST_BLOCKS and (verify or error.code != DAMAGED):
                raise
            verify = error.code == DAMAGED
        await fleet.membership.refresh(relist=True)
    raise failure


async def _attempt(
    fleet: Fleet,
    key: AgentKey,
    owner: Holding,
    target: NodeName,
    keep: Keep,
    *,
    background: bool,
    verify: bool,
) -> CopyReceipt:
    with span("copy", agent=fleet.alias(key), source=owner.node, target=target) as copy_span:
        receipt = await _copy(fleet, key, owner, target, keep, background=background, verify=verify)
        copy_span.note(bytes=receipt.bytes_sent)
    return receipt


async def _copy(
    fleet: Fleet,
    key: AgentKey,
    owner: Holding,
    target: NodeName,
    keep: Keep,
    *,
    background: bool,
    verify: bool,
) -> CopyReceipt:
    name = fresh_migration()
    started_s = fleet.clock.monotonic_s()
    source, target_link = fleet.link(owner.node), fleet.link(target)
    abort = AbortMigration(*key, name)
    try:
        call = OfferCopy(*key, owner.epoch, name, target, verify)
        offer = await source.call(call, Offer)
        copied = Copied(0, 0, 0, 0.0)
        if source.name != target:
            fleet.partners.note(source.name, target)
            urgency = Urgency.PREFETCH if background else Urgency.FETCH
            blocks = CopyBlocks(name, source.name, offer, urgency)
            copied = await target_link.call(blocks, Copied)
        view = await target_link.call(keep(name, offer.manifest), AgentView)
    except BaseException:
        await asyncio.shield(best_effort_call(target_link, abort))
        raise
    finally:
        await asyncio.shield(best_effort_call(source, abort))  # withdraws the offer
    return CopyReceipt(
        agent=key[1],
        source=source.name,
        target=target,
        view=view,
        blocks_sent=copied.blocks_sent,
        blocks_reused=copied.blocks_reused if source.name != target else view.blocks,
        bytes_sent=copied.bytes_sent,
        seconds=fleet.clock.monotonic_s() - started_s,
    )
