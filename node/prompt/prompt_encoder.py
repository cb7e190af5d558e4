"""Encoding of prompts: rendered as text, encoded, matched with the agent's record.

Dedicated threads do it, apart from those that save and load. It takes memory and time by the byte,
so the bytes encoded at once are limited; later prompts wait in a queue. Small prompts are not
counted and wait for a thread only.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fabric.errors import ConflictError, RejectedError
from fabric.kvcache.arrangement import unshiftable_reason
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import EDIT_KEPT_TOKENS_MIN
from fabric.record.bounds import has_too_long_tokens
from fabric.record.directed_messages import edits_of, pending_directives, rewrite_text
from fabric.record.manifest import Manifest
from fabric.turn.edited_prompt import Edit, plan_edited_prompt
from fabric.turn.generation import GenerateRequest, IdentityKind, MatchKind, Sampling
from fabric.turn.messages import template_form
from fabric.turn.prompt_plan import (
    EMPTY_TRANSCRIPT,
    Encoded,
    PromptLimit,
    PromptPlan,
    Transcript,
    plan_prompt,
    plan_tokens,
)
from node.dialect.folding import Rendered
from node.limits import ENCODERS, ENCODING_BYTES_MAX, ENCODING_SMALL_BYTES
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.token_text import SpelledTokens, spell
from node.prompt.prompt_boundaries import PromptBoundaries
from node.runtime.identity import NodeIdentity

T = TypeVar("T")

_INVALID = "invalid_request_error"


def transcript_of(record: Manifest) -> Transcript:
    """Return the transcript of an agent's cache from its record."""
    if not record.token_ids:
        return EMPTY_TRANSCRIPT
    ids, ends = list(record.token_ids), list(record.token_ends)
    return Transcript(record.text.encode(), ids, ends)


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Renderer and encoder of a node's prompts; takes time by the byte, and is thread-safe."""

    identity: NodeIdentity
    tokenizer: ChatTokenizer
    boundaries: PromptBoundaries

    def limit(self, is_unwanted: Callable[[], bool]) -> PromptLimit:
        """Return the limit of a prompt's length; encoding stops once it `is_unwanted`."""
        reach_bytes = self.tokenizer.reach_bytes
        return PromptLimit(self.identity.model.context_tokens_max, reach_bytes, is_unwanted)

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise RejectedError for a bias of a token that the model lacks.

        Nothing below checks an index: such a bias would write outside of the logits.
        """
        for key in sampling.logit_bias:
            is_number = key.isascii() and key.isdigit()
            if not is_number or int(key) >= self.identity.model.vocabulary_size:
                message = f"the model has the tokens 0 to {self.identity.model.vocabulary_size - 1}"
                raise RejectedError(message, code=_INVALID, param="logit_bias")

    def render(self, request: GenerateRequest, limit: PromptLimit) -> Rendered:
        """Return the prompt as text, and the notes of its folds.

        Raise RejectedError if the request has no valid prompt, or a far too long one.
        """
        sources = (request.messages, request.prompt, request.prompt_ids)
        if sum(source is not None for source in sources) != 1:
            message = "send either messages or a prompt"
            raise RejectedError(message)
        if request.prompt_ids is not None:
            spelled = self._spell(request.prompt_ids, limit)
            rendered = Rendered(spelled.text, ends=spelled.ends)
        elif request.prompt is not None:
            begun = self.tokenizer.begun_at_end(request.prompt) if request.extends else ""
            plain = request.plain_marks or () if request.extends else ()
            rendered = Rendered(request.prompt, begun=begun, plain=plain)
        else:
            messages = [template_form(message) for message in request.messages or ()]
            options = request.template_options
            rendered = self.tokenizer.rendered(
                messages, request.tools, options, continues=request.continues
            )
        text = rendered.text
        try:
            size_bytes = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError:
            message = "the prompt contains half of a surrogate pair, which is not text"
            raise RejectedError(message, code="invalid_text", param="messages") from None
        limit.check_bytes(size_bytes)
        return rendered

    def _spell(self, ids: Sequence[int], limit: PromptLimit) -> SpelledTokens:
        """Return a prompt of tokens as text; raise RejectedError where the model lacks one."""
        limit.check(len(ids))
        if not ids or max(ids) >= self.identity.model.vocabulary_size:
            size = self.identity.model.vocabulary_size
            message = f"a token prompt must have at least one token, each within 0 to {size - 1}"
            raise RejectedError(message, code=_INVALID, param="prompt")
        return spell(ids, self.tokenizer.decode)

    def count(self, request: GenerateRequest, rendered: Rendered, limit: PromptLimit) -> int:
        """Return how many tokens a rendered prompt has."""
        if rendered.ends is not None:
            return len(rendered.ends)
        raw = self._is_raw(request)
        encoded = self.tokenizer.encode(
            rendered.text, special_prefix=raw, limit=limit, plain=rendered.plain
        )
        return len(encoded.ids)

    def plan(
        self, request: GenerateRequest, record: Manifest, rendered: Rendered, limit: PromptLimit
    ) -> PromptPlan:
        """Encode the prompt and match it with the agent's record; raise RejectedError."""
        text, stored = rendered.text, transcript_of(record)
        if request.prompt_ids is not None:
            assert rendered.ends is not None, "tokens were spelled one by one"
            encoded = Encoded(list(request.prompt_ids), rendered.ends)
            return plan_tokens(text.encode(), encoded, stored)
        raw = self._is_raw(request)
        if request.extends:
            if not text.encode().startswith(rewrite_text(record)):
                message = "the agent's context has changed meanwhile: request the prompt again"
                raise ConflictError(message, code="agent_changed")
            raw = bool(stored.ends) and stored.ends[0] == 0  # it has the tokenizer's own prefix
        plan = plan_prompt(self.tokenizer, text, stored, raw=raw, limit=limit, plain=rendered.plain)
        keeps = request.edits is not None and request.edits.keeps
        if keeps and (request.extends or not raw):
            plan = self._plan_edited(request, stored, plan, edits_of(pending_directives(record)))
        has_states = CacheGroup.STATE in self.identity.spec.groups
        return replace(plan, marks=self.boundaries.find(request, plan, has_states=has_states))

    def _plan_edited(
        self, request: GenerateRequest, stored: Transcript, plan: PromptPlan, edits: Sequence[Edit]
    ) -> PromptPlan:
        """Plan to keep the tokens after an edit, if there is one and the model allows it."""
        is_edited = plan.match is MatchKind.DIVERGE
        if not is_edited or request.identity.kind is not IdentityKind.AGENT:
            return plan
        if len(stored.ids) < plan.kept_tokens + EDIT_KEPT_TOKENS_MIN:
            return plan
        why = unshiftable_reason(self.identity.spec)
        if why:
            return replace(plan, reason=f"{plan.reason}; nothing after it is kept: {why}")
        recomputed = self.identity.settings.edit_recomputed_tokens
        cuts, control = self.tokenizer.cut_texts, self.tokenizer.control_marks.tokens
        return plan_edited_prompt(plan, stored, cuts, recomputed, edits, control) or plan

    def _is_raw(self, request: GenerateRequest) -> bool:
        """Return whether a prompt has no template's marks, and gets the tokenizer's own prefix."""
        return request.messages is None or not self.tokenizer.template.exists

    def check_plan(self, request: GenerateRequest, plan: PromptPlan) -> None:
        """Raise RejectedError where the prompt cannot be computed here."""
        count = len(plan.ids)
        if count == 0:
            message = "the prompt has no tokens"
            raise RejectedError(message, code="empty_prompt", param="messages")
        # The last token of a resumption is its answer's: it may be the last that the context holds.
        is_answer = request.resume is not None
        PromptLimit(self.identity.model.context_tokens_max, None).check(count - is_answer)
        vocabulary_size = self.identity.model.vocabulary_size
        if max(plan.ids) >= vocabulary_size:  # a tokenizer may have more tokens than the model
            message = f"the prompt has a token that the model lacks: it has {vocabulary_size}"
            raise RejectedError(message, code=_INVALID, param="messages")
        if not is_answer and has_too_long_tokens(plan.ends, plan.kept_tokens):
            message = "the prompt has longer runs of white space than are kept: shorten them"
            raise RejectedError(message, code=_INVALID, param="messages")


@dataclass(slots=True, eq=False)
class EncoderThreads:
    """Encoder threads of a node; used on its event loop."""

    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
    )
    _used_bytes: int = 0
    _waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    async def run(self, work: Callable[[], T], size_bytes: int = 0) -> T:
        """Run `work` on a thread, once `size_bytes` fit the limit."""
        async with self._count_bytes(size_bytes):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown()

    @contextlib.asynccontextmanager
    async def _count_bytes(self, size_bytes: int) -> AsyncIterator[None]:
        if size_bytes <= ENCODING_SMALL_BYTES:
            yield
            return
        size_bytes = min(size_bytes, ENCODING_BYTES_MAX)
        await self._acquire(size_bytes)
        try:
            yield
        finally:
            self._used_bytes -= size_bytes
            self._admit_waiting()

    async def _acquire(self, size_bytes: int) -> None:
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, admitted))
        self._admit_waiting()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # admitted, then cancelled at once
                self._used_bytes -= size_bytes
            self._admit_waiting()
            raise

    def _admit_waiting(self) -> None:
        while self._waiting:
            size_bytes, admitted = self._waiting[0]
            if admitted.cancelled():
                self._waiting.popleft()
                continue
            if self._used_bytes + size_bytes > ENCODING_BYTES_MAX:
                return
            self._waiting.popleft()
            self._used_bytes += size_bytes
            admitted.set_result(None)
