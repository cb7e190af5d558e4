"""Claim of a turn on its agent: resolve the identity, wait for the lock, check ownership."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from fabric.errors import (
    FabricError,
    OverloadedError,
    RetryElsewhereError,
    RetryLaterError,
    StaleEpochError,
)
from fabric.ids import SELF_TEST_TENANT, AgentKey, MigrationId
from fabric.record.answers import Answers
from fabric.record.directive import Directive, live_directives
from fabric.record.layout import Layout
from fabric.record.lenders import Lender
from fabric.record.manifest import AgentSettings, Manifest, OwnerState
from fabric.turn.conversation_form import FormChain
from fabric.turn.generation import GenerateRequest, IdentityKind
from fabric.turn.sketch import continues_sketch
from node.agents.agent import Agent, PausedAnswer
from node.agents.agent_table import AgentTable, Recognized
from node.engine.moving_streams import MovingStreams
from node.limits import AGENT_TURNS_WAITING_MAX
from node.migration.incoming import IncomingMoves
from node.prompt.earlier_answers import KnownAnswers
from node.runtime.health import Health
from node.store.granted_terms import GrantedTerms
from node.store.tombstones import TombstoneStore
from node.tiers.disk_budget import DiskBudget
from node.tiers.hot_tier import HotTier

DECISION_WAIT_S = 30.0  # how long a turn waits for the outcome of its agent's move
RESUME_WAIT_S = 5.0  # for the router to resume a paused answer


@dataclass(frozen=True, slots=True)
class Claims:
    """Claims of turns on a node's agents; used on its event loop."""

    table: AgentTable
    budget: DiskBudget
    erased: TombstoneStore
    moves: IncomingMoves
    moving: MovingStreams
    hot: HotTier
    health: Health
    retry_after_s: Callable[[int, int], float]  # takes a queue's turns and slots
    terms: GrantedTerms

    @contextlib.asynccontextmanager
    async def hold(
        self, request: GenerateRequest, text: str, forms: FormChain | None = None
    ) -> AsyncIterator[Agent]:
        """Hold the agent of this request, so that no other turn of the agent runs.

        A turn that is not kept gets a temporary agent, which is not in the table.
        """
        if not request.is_kept:
            yield self._sibling(request)
            self.hot.drop_resident()
            return
        if request.after is not None:
            await self._await_handover(request, request.after)
        while True:
            agent = await self._lock(request, text, forms)
            try:
                await self.admit(request)  # again: encoding and locking took time
                await self._check_ownership(agent, request.epoch, request.erased_epoch)
                self._keep_private(agent, request)
                before = agent.paused_answer
                if request.resume is not None or not before or before.epoch != agent.manifest.epoch:
                    agent.end_paused_answer()
                    yield agent
                    return
            finally:
                agent.turn_lock.release()
                if agent.is_blank and not agent.waiting_count:
                    self.table.forget(agent)  # its turn stored nothing, and no turn waits for it
                elif self.table.get(agent.key) is agent:
                    self.table.use.retain(agent.key, request.retain_s)
                self.hot.drop_resident()
            await _await_resumption(agent, before)

    async def admit(self, request: GenerateRequest) -> None:
        """Raise OldRouterError for a turn of a router whose term is over."""
        if request.tenant != SELF_TEST_TENANT:  # the node's own
            await self.terms.admit(request.term)

    def _sibling(self, request: GenerateRequest) -> Agent:
        """Return a temporary agent for a turn that is not kept.

        It gets the record of the agent `beside` if that is edited: unedited blocks are found by
        their content, edited ones only through their record.
        """
        name = self.table.name_new(request.identity)
        sibling = self.table.unlisted(request.tenant, name, None, request.epoch)
        beside = self._find_known(request, None) if request.beside is not None else None
        record = beside.saved if beside is not None else None
        if beside is None or record is None or record.edited is None or self._is_erased(beside):
            return sibling
        blank = sibling.manifest
        sibling.saved = sibling.manifest = replace(
            record,
            agent=blank.agent,
            group=None,
            owner=blank.owner,
            epoch=blank.epoch,
            state=blank.state,
        )
        return sibling

    async def _await_handover(self, request: GenerateRequest, migration: MigrationId) -> None:
        """Wait for the move that brings the agent here; raise RetryElsewhereError if none does."""
        assert request.identity.agent is not None, "only a named agent moves"
        key = request.tenant, request.identity.agent
        if not self._is_owned(key, request.epoch) and not self.moves.is_aborted(migration):
            self.moving.begin_pause(migration)
            await self.moves.wait_until_decided(migration)
        if not self._is_owned(key, request.epoch):
            message = "the agent's move to this node failed; ask its owner"
            raise RetryElsewhereError(message)

    def _is_owned(self, key: AgentKey, epoch: int) -> bool:
        agent = self.table.get(key)
        if agent is None:
            return False
        record = agent.effective_record
        return record.state is not OwnerState.REPLICA and record.epoch >= epoch

    async def _lock(self, request: GenerateRequest, text: str, forms: FormChain | None) -> Agent:
        """Wait for the agent's lock; resolve the agent again if it was evicted in the meantime."""
        for _ in range(AGENT_TURNS_WAITING_MAX):
            with contextlib.suppress(
                FabricError
            ):  # if there is no room, a new agent is refused below
                await self.budget.make_place(request.tenant)
            recognized = self._resolve(request, text, forms)
            agent = recognized.agent
            if agent.waiting_count >= AGENT_TURNS_WAITING_MAX and request.resume is None:
                break
            agent.waiting_count += 1
            try:
                await agent.turn_lock.acquire()
            finally:
                agent.waiting_count -= 1
            if not agent.was_evicted:
                agent.is_superseded = recognized.is_superseded
                return agent
            agent.turn_lock.release()
        message = f"{AGENT_TURNS_WAITING_MAX} turns already wait for this agent; retry later"
        wait_s = self.retry_after_s(AGENT_TURNS_WAITING_MAX, 1)
        raise OverloadedError(message, retry_after_s=wait_s)

    def owned_record(self, key: AgentKey) -> Manifest | None:
        """Return an agent's record if this node owns the agent."""
        agent = self.table.get(key)
        is_owned = agent is not None and agent.effective_record.state is not OwnerState.REPLICA
        return agent.manifest if agent is not None and is_owned else None

    def answers(
        self, request: GenerateRequest, places: Sequence[int], forms: FormChain | None
    ) -> KnownAnswers:
        """Return the omitted parts of a chat's answers, from its agent or from other agents.

        Other agents are not searched if the agent gave all of the chat's answers: a part that it
        lacks was not omitted, although another agent may have given a similar answer there.
        """
        if not places:
            return KnownAnswers()
        agent = self._find_known(request, forms)
        own_answers = self.table.answers_of(agent) if agent is not None else {}
        other_answers: Answers = {}
        if agent is None or not continues_sketch(agent.manifest.sketch, request.sketch):
            missing = [place for place in places if place not in own_answers]
            other_answers = self.table.answers_at(request.tenant, missing)
        return KnownAnswers(
            {**other_answers, **{at: own_answers[at] for at in places if at in own_answers}},
            own_answers,
        )

    def directives(self, request: GenerateRequest) -> tuple[Directive, ...]:
        """Return the directives of the agent that a request names."""
        agent = (
            self._find_known(request, None) if request.identity.kind is IdentityKind.AGENT else None
        )
        return live_directives(agent.manifest.directives) if agent is not None else ()

    def _keep_private(self, agent: Agent, request: GenerateRequest) -> None:
        """Make an agent private if it was private on its previous node."""
        is_new = agent.is_blank or agent.is_taken_over
        agent.is_taken_over = False
        if request.is_private and is_new and not agent.manifest.is_private:
            settings = replace(agent.manifest.settings or AgentSettings(), is_private=True)
            agent.manifest = replace(agent.manifest, settings=settings)
            self.table.put(agent)

    def _find_known(self, request: GenerateRequest, forms: FormChain | None) -> Agent | None:
        """Find the agent of a chat before the prompt is rendered."""
        identity, agent = request.identity, request.identity.agent
        if request.beside is not None:
            return self.table.get((request.tenant, request.beside))
        if identity.kind is IdentityKind.AGENT and agent is not None:
            return self.table.get((request.tenant, agent))
        return self.table.find_known(request.tenant, identity, request.sketch, forms)

    def _resolve(self, request: GenerateRequest, text: str, forms: FormChain | None) -> Recognized:
        table, identity = self.table, request.identity
        if identity.kind is IdentityKind.AGENT:
            assert identity.agent is not None, "an AGENT identity names its agent"
            agent = table.get((request.tenant, identity.agent))
            if agent is None:
                self.health.refuse_new()
                epoch = self.erased.claim_epoch(request.tenant, identity.agent, request.epoch)
                agent = table.create(request.tenant, identity.agent, None, epoch)
            return Recognized(agent)
        # The sketch of a raw prompt lacks the last piece.
        sketch = request.sketch if request.messages is not None else ()
        recognized = table.recognize(request.tenant, identity, text.encode(), sketch, forms)
        if recognized is not None and not self._is_erased(recognized.agent):
            return recognized
        self.health.refuse_new()
        group = identity.agent if identity.kind is IdentityKind.GROUP else None
        name = table.name_new(identity)
        epoch = self.erased.claim_epoch(request.tenant, name, request.epoch)
        return Recognized(table.create(request.tenant, name, group, epoch))

    def _is_erased(self, agent: Agent, router_epoch: int = 0) -> bool:
        """Return whether an agent was erased, according to this node or the turn's router."""
        epoch = agent.manifest.epoch
        return epoch <= router_epoch or self.erased.is_erased(agent.key, epoch)

    def lost(self, agent: Agent) -> StaleEpochError:
        """Return the error for a turn whose agent was erased or taken over before its end."""
        if self._is_erased(agent):
            message = "the agent was erased during this turn"
            return StaleEpochError(message, code="erased")
        message = f"another node took the agent over at epoch {agent.outgoing.fence}"
        return StaleEpochError(message, code="fenced")

    def lenders(self, agent: Agent, layout: Layout) -> tuple[Lender, ...]:
        """Return the lenders of a turn's cache; raise RetryLaterError if one was erased."""
        lenders = (*agent.lenders, *layout.lenders)
        error = self.lender_error(agent, lenders)
        if error is not None:
            raise error
        return lenders

    def lender_error(self, agent: Agent, lenders: Sequence[Lender]) -> RetryLaterError | None:
        """Return the error for a cache with rows of an erased agent, or None."""
        if not self.erased.has_erased_lender(agent.key[0], lenders):
            return None
        message = "a part of the cache was borrowed from an erased agent: send the turn again"
        return RetryLaterError(message, code="lender_erased")

    async def _check_ownership(self, agent: Agent, router_epoch: int, erased_epoch: int) -> None:
        """Check that this node may serve the agent at the router's epoch; raise if not."""
        try:
            await asyncio.wait_for(agent.outgoing.wait_until_decided(), DECISION_WAIT_S)
        except TimeoutError:
            message = "the agent is being moved; retry later"
            raise RetryLaterError(message, code="migrating") from None
        if self.table.get(agent.key) is not agent:
            message = "the agent was erased while this turn waited"
            raise RetryLaterError(message, code="erased")
        record = agent.effective_record
        if self._is_erased(agent, erased_epoch):
            message = "the agent is being erased"
            raise RetryLaterError(message, code="erased")
        fence = agent.outgoing.fence
        if (router_epoch or record.epoch) < fence:  # 0: the agent was found by its content
            message = f"another node owns the agent at epoch {fence}"
            raise StaleEpochError(message)
        if record.state is OwnerState.REPLICA and router_epoch <= record.epoch:
            message = f"the agent is owned by {record.owner} at epoch {record.epoch}"
            raise RetryElsewhereError(message)
        if 0 < router_epoch < record.epoch:
            message = f"epoch {router_epoch} is stale: the agent is already at epoch {record.epoch}"
            raise StaleEpochError(message)
        if router_epoch > record.epoch:  # the directory made this node the owner
            agent.is_taken_over = self.table.is_copy(agent)
            agent.manifest = replace(
                record, epoch=router_epoch, owner=self.health.name, state=OwnerState.OWNED
            )
            self.table.put(agent)


async def _await_resumption(agent: Agent, before: PausedAnswer) -> None:
    """Wait until a paused answer is resumed, since its client has read a part of it."""
    agent.waiting_count += 1
    try:
        await asyncio.wait_for(before.is_resumed.wait(), RESUME_WAIT_S)
    except TimeoutError:  # its client has disconnected
        if agent.paused_answer is before:
            agent.end_paused_answer()
    finally:
        agent.waiting_count -= 1
