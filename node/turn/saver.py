"""Saver of a turn: the prompt's blocks while the answer is decoded, the rest at the end.

Blocks that are not stored yet are copied out of the cache one at a time, between two steps, so that
saving a long prompt does not stall other agents' decoding. Data that the cache drops (blocks that
slide out of a window, recurrent states) is saved as soon as it exists; prefill pauses while too
much of it is unsaved.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fabric.control.node_calls import SealAgent
from fabric.errors import EngineFailedError, FabricError
from fabric.kvcache.block_chain import BlockSpan
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import BLOCK_TOKENS
from fabric.ports import Clock
from fabric.record.answers import encode_answers
from fabric.record.directive import Directive, mark_applied
from fabric.record.manifest import AgentSettings, Manifest, OwnerState
from fabric.record.piece_table import PieceTable
from fabric.record.provenance import Provenance, TruncatedBy
from fabric.record.turn_history import TurnNote, append_turn
from fabric.turn.conversation_form import ConversationForm
from fabric.turn.generation import IdentityKind
from fabric.u32s import U32s
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.engine.sequence import Ended, Head
from node.limits import UNSAVED_BYTES_MAX
from node.mlx.resident_cache import ResidentCache
from node.prompt.directed_request import parts_after, positions_after
from node.prompt.earlier_answers import ShownAnswer, remember_answer
from node.prompt.pipeline import PlannedPrompt
from node.runtime.health import Health
from node.store.service_time import ServiceTime
from node.tiers.hot_tier import Unsaved
from node.tiers.record_writer import RecordWriter, RecordWriters
from node.turn.heads import TurnHeads
from node.turn.prepared import Prepared

_log = logging.getLogger(__name__)
IDLE_SHARE = 19.0  # saving ahead takes 1/20 of the time, so that it does not slow down decoding
FIRST_WAIT_S = 0.25  # longer than a short answer takes
DRAIN_S = 0.05  # between two saves of data that the cache drops


@dataclass(frozen=True, slots=True)
class Savers:
    """The parts of a node that save its turns."""

    clock: Clock
    table: AgentTable
    writers: RecordWriters
    unsaved: Unsaved
    service_time: ServiceTime
    health: Health
    heads: TurnHeads


class Saver:
    """Saver of one turn."""

    def __init__(
        self,
        parts: Savers,
        agent: Agent,
        prepared: Prepared,
        prompt: PlannedPrompt,
        head: Head | None,
    ) -> None:
        self._parts = parts
        self._head = head
        self._engine = parts.writers.engine
        self._spec = parts.writers.store.spec
        self._agent = agent
        self._prepared = prepared
        self._prompt = prompt
        self._request = prompt.restored.request
        self._cache = prepared.cache
        self._writer = RecordWriter(
            parts.writers, agent, self._cache, prepared.layout, prepared.cached
        )
        self._ids: Sequence[int] = prepared.plan.ids[:-1]  # tokens whose blocks are saved ahead
        self._named_tokens = prepared.plan.kept_tokens  # leading tokens whose blocks have names
        self._early: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None  # publication of awaited blocks
        self._writing = asyncio.Lock()  # prevents storing a block twice
        self._is_decoding = False
        self._has_failed = False
        self._over = asyncio.Event()

    # --- ahead of the turn's end -------------------------------------------------------------

    def begin(self, *, is_decoding: bool) -> None:
        """Start saving complete blocks, which no longer change."""
        if is_decoding:  # a hot prompt; other turns get the event `Started`
            self.note_decoding()
        if self._request.is_kept and self._parts.health.reuses:
            self._early = asyncio.create_task(self._save_ahead())

    def note_decoding(self) -> None:
        self._is_decoding = True
        self._engine.moving.end_pause(self._agent.manifest.migration)  # the move that brought it

    def publish_awaited(self) -> None:
        """Begin to publish the computed part of an awaited head, if there is one."""
        is_busy = self._publishing is not None and not self._publishing.done()
        if self._head is not None and self._early is not None and not is_busy:
            self._publishing = asyncio.create_task(self._publish_head(self._head))

    async def _publish_head(self, head: Head) -> None:
        """Publish at full speed, since other turns wait."""
        parts, writer = self._parts, self._writer
        try:
            while not self._over.is_set() and head.leads:
                end = min(head.awaited_tokens, self._cache.tokens_count)
                if end < head.awaited_tokens or not head.shares_parts:
                    end -= end % BLOCK_TOKENS
                if end <= head.published_tokens:
                    return
                async with self._writing:
                    await self._name(self._ids)
                    blocks = await writer.save_beginning(self._ids, end)
                if self._agent.is_private:  # made private since the turn began
                    break
                parts.heads.lend(head, blocks)
                head.published_tokens = end
                self._engine.wake()
            else:
                return
        except (FabricError, OSError) as error:
            _log.warning("an awaited head is not published: %s", error)
        except Exception:  # noqa: BLE001 - optional: waiting turns compute it themselves
            _log.exception("publishing a head failed")
            parts.health.note_failed_round()
        head.leads = False
        parts.heads.take_back(head)
        self._engine.wake()

    def is_behind(self) -> bool:
        """Return whether too much data is unsaved, so that prefill must pause."""
        if self._has_failed or self._early is None:
            return False
        spec, cache = self._spec, self._cache
        waiting = sum(view.nbytes for view in list(cache.slid.values()))
        waiting += len(cache.snapshots) * spec.kv_bytes(0, CacheGroup.STATE)
        return waiting > max(UNSAVED_BYTES_MAX, 2 * spec.kv_bytes(0, CacheGroup.STATE))

    async def _save_ahead(self) -> None:
        writer = self._writer
        try:
            async with self._writing:
                spans = await self._name(self._ids)
            named_blocks = zip(spans, writer.find_all_stored(spans), strict=True)
            full = deque(span for span, ref in named_blocks if span.is_full and ref is None)
            passing = len(self._spec.groups) > 1
            wait_s = DRAIN_S if passing else FIRST_WAIT_S
            while (full or passing) and not await self._is_over_within(wait_s):
                async with self._writing:
                    await writer.save_passing(self._ids)
                self._engine.wake()
                wait_s = DRAIN_S if passing else FIRST_WAIT_S
                if full and self._is_decoding and not self._engine.moving.are_silent:
                    began_s = self._parts.clock.monotonic_s()
                    async with self._writing:
                        await writer.save(full.popleft(), self._ids)
                    wait_s = IDLE_SHARE * (self._parts.clock.monotonic_s() - began_s)
        except (FabricError, OSError) as error:
            _log.warning("saving ahead stopped: %s", error)
            self._has_failed = True
        except Exception:  # noqa: BLE001 - optional: the end of the turn saves the same blocks
            _log.exception("saving ahead failed")
            self._parts.health.note_failed_round()
            self._has_failed = True
        finally:
            self._engine.wake()

    async def _name(self, ids: Sequence[int]) -> Sequence[BlockSpan]:
        spans = await self._writer.name(ids, self._named_tokens)
        self._ids, self._named_tokens = ids, len(ids)
        return spans

    async def save_now(self, answer_ids: Sequence[int]) -> Manifest | None:
        """Save all full blocks that the turn has so far; return an unpublished record of them.

        Another node may copy the record's blocks while the turn continues. Returns None if there is
        no full block, or if the disk refuses.
        """
        ids = [*self._prepared.plan.ids, *answer_ids]
        try:
            async with self._writing:
                if self._has_failed or self._over.is_set():
                    return None
                pieces, edited = await self._writer.save_full(ids, self._named_tokens)
                self._ids, self._named_tokens = ids, len(ids)
        except (FabricError, OSError) as error:
            _log.warning("saving for a move stopped: %s", error)
            return None
        count = pieces.tokens_count
        if not count:
            return None
        return replace(
            self._agent.manifest,
            text="",
            token_ids=U32s(ids[:count]),
            token_ends=U32s([0] * count),
            prompt_tokens_count=0,
            pieces=pieces,
            windows=(),
            states=(),
            edited=edited,
            positions=None,  # a record without text has no message positions
        )

    async def _is_over_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return self._over.is_set()

    async def _end_early(self) -> None:
        self._over.set()
        if self._early is not None:
            await self._early
        if self._publishing is not None:
            await self._publishing
        async with self._writing:  # a move's `save_now` stops after its current block
            pass

    # --- the end of the turn -----------------------------------------------------------------

    async def abandon(self, *, lends: bool = False) -> None:
        """End without a record; the blocks saved ahead become unreferenced.

        With `lends`, blocks that other turns await are held until those turns have started.
        """
        await self._end_early()
        if self._head is not None and lends:
            self._parts.heads.keep(self._head)
        self._writer.abandon()

    async def commit(
        self,
        ended: Ended,
        shown: ShownAnswer,
        seal: SealAgent | None,
        note: Callable[[], TurnNote],
    ) -> bool:
        """Publish the turn's record and keep its cache hot; return whether it is durable.

        `note` is called once all blocks are saved. With `seal`, the published record is also sealed
        for that move: one write is faster than two.
        """
        await self._end_early()
        cache, agent, parts = self._cache, self._agent, self._parts
        if not self._request.is_kept:
            await self.abandon()
            return True
        manifest = self._record(ended, shown)
        if cache.tokens_count != manifest.tokens_count:
            await self.abandon()
            message = (
                f"the cache holds {cache.tokens_count} tokens, its record {manifest.tokens_count}"
            )
            raise FabricError(message, code="cache_out_of_step")
        if not manifest.token_ids or not parts.health.reuses:
            await self.abandon()
            return False
        try:
            same_tokens = min(self._named_tokens, manifest.prompt_tokens_count)
            final = manifest if seal is None else manifest.sealed(seal.migration, seal.target)
            saved = await self._writer.publish(
                final,
                same_tokens,
                is_superseding=agent.is_superseded,
                completed=lambda record: _with_turn(record, note()),
            )
        except EngineFailedError:
            raise
        except (FabricError, OSError) as error:
            await self._writer.compute(cache.rest)
            parts.unsaved.note_failure(agent, error)
            manifest = _with_turn(manifest, note())
            agent.manifest = replace(manifest, pinned=agent.manifest.pinned)
            agent.stored_tokens = min(agent.stored_tokens, self._prepared.cached)
            agent.layout = self._writer.layout
            agent.cache = cache
        else:
            agent.note_saved(saved, self._writer.spans)
            agent.cache = await self._idle_cache(ended)
        parts.table.put(agent)
        if agent.is_durable:
            parts.unsaved.note_success()
        return agent.is_durable

    async def _idle_cache(self, ended: Ended) -> ResidentCache | None:
        """Trim a saved turn's cache to an idle agent's needs; return None if it is not kept."""
        try:
            await self._writer.compute(self._cache.rest)
        except EngineFailedError:
            return None
        return None if ended.is_preempted and self._agent.is_durable else self._cache

    def _directives_after(self, *, is_whole: bool) -> tuple[Directive, ...] | None:
        """Return the agent's directives; mark those that a completely computed prompt applied.

        They count as applied even if the answer moves to another node, which cannot tell which of
        them matched.
        """
        directives = self._agent.manifest.directives
        if not directives or not (is_whole or self._request.extends):
            return directives
        return (
            mark_applied(directives, self._prompt.directed.matched)
            if self._request.resume is None
            else directives
        )

    def _form_after(self, ended: Ended, shown: ShownAnswer) -> ConversationForm | None:
        """Return the form of an unnamed conversation with its answer.

        An incomplete answer leaves the form unchanged, since later prompts begin with that form.
        """
        forms, old_form = self._prompt.restored.located.forms, self._agent.manifest.form
        is_moved = self._request.resume is not None  # a moved answer's turn names the agent
        if forms is None or (is_moved and old_form is None):
            return None
        if ended.reason is None:
            return old_form or forms.whole
        answer = shown.message
        if self._request.continues:
            begun_answer = (self._request.messages or ())[-1]
            answer = replace(answer, texts=begun_answer.texts + answer.texts)
        return forms.form_with(answer)

    def _settings_after(self, ended: Ended) -> AgentSettings | None:
        settings = self._agent.manifest.settings
        if settings is None or ended.reason is None:
            return settings
        return settings.after_turn()

    def _record(self, ended: Ended, shown: ShownAnswer) -> Manifest:
        """Return the record of the cache; for a cancelled prompt, of its computed tokens."""
        plan, old = self._prepared.plan, self._agent.manifest
        count = min(len(plan.ids), self._cache.tokens_count)
        text, taken = plan.text, min(plan.taken_tokens, count)
        ids = old.token_ids[:taken] + plan.ids[taken:count]
        ends = old.token_ends[:taken] + plan.ends[taken:count]
        truncated_by, marks = None, plan.marks
        if self._request.resume is not None:  # the answer's first node found the boundaries
            marks = old.provenance.marks
        if count < len(plan.ids):
            text = text[: ends[-1] if ends else 0]
            # Conversations with the same system prompt must not continue this agent's context.
            is_named = self._request.identity.kind is IdentityKind.AGENT
            truncated_by = TruncatedBy.CANCELLED if is_named else None
        answers, answer = old.provenance.answers, ended.answer_text.encode("utf-8", "replace")
        if ended.reason is not None:
            known_answers = self._parts.table.answers_of(self._agent)
            redacted = self._prompt.directed.redacted
            answers = encode_answers(
                remember_answer(self._prompt.restored, shown, known_answers, redacted)
            )
        return replace(
            old,
            revision=old.revision + 1,
            state=OwnerState.OWNED,
            text=(text + answer).decode("utf-8", "replace"),
            token_ids=ids + ended.answer_ids,
            token_ends=ends + [len(text) + end for end in ended.answer_ends],
            prompt_tokens_count=count,
            pieces=PieceTable(),
            windows=(),
            states=(),
            edited=None,
            directives=self._directives_after(is_whole=count == len(plan.ids)),
            positions=positions_after(old.positions, self._prompt.directed, text, answer, shown),
            parts=parts_after(old.parts, self._prompt.directed, answer, shown),
            settings=self._settings_after(ended),
            sketch=self._request.sketch or old.sketch,
            form=self._form_after(ended, shown),
            used_s=self._parts.clock.wall_s(),
            migration=None,
            sealed_to=None,
            provenance=Provenance(
                served=self._parts.service_time.stamp(),
                truncated_by=truncated_by,
                marks=marks.within(count),
                answers=answers,
                turns=old.provenance.turns,
            ),
        )


def _with_turn(record: Manifest, note: TurnNote) -> Manifest:
    """Return the record with one more turn in its history."""
    before = record.provenance
    return replace(record, provenance=replace(before, turns=append_turn(before.turns, note)))
