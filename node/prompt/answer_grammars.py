"""Grammars of answers: compiled on their own threads, and cached for later turns.

A compilation cannot be stopped, so its input is bounded beforehand (`OutputFormat.check`), and a
turn waits for it only until a timeout.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, TypeVar

from fabric.codec import dump_json
from fabric.errors import OverloadedError, RejectedError
from fabric.ids import TenantId
from fabric.turn.answer_constraints import PARAM, CallChoice, check_schema
from fabric.turn.generation import GenerateRequest, Sampling
from node.dialect.tool_schema import ToolSpec, callable_tools, tool_refusal
from node.grammar.answer_matcher import AnswerMatcher, CallRule
from node.grammar.compiler import Compiler, Grammar, reason_of, refusal
from node.grammar.reasons import without_place
from node.grammar.thought import Beginning, ThoughtMarks, beginning_of
from node.limits import (
    CALL_SCHEMAS_BYTES_MAX,
    GRAMMAR_COMPILE_S,
    GRAMMAR_WORKERS,
    GRAMMARS_COMPILING_MAX,
    GRAMMARS_KEPT_MAX,
)
from node.mlx.chat_tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class CallGrammars:
    """Builds grammars of tool calls; thread-safe."""

    compiler: Compiler
    tokenizer: ChatTokenizer
    tools: list[Any] | None = field(repr=False)
    choice: CallChoice

    def key(self) -> str:
        """Return the grammar's cache key; raise RejectedError for unenforceable tools."""
        spelled = [
            [tool.name, tool.parameters, tool.is_strict, tool.rules]
            for tool in self._offered_tools()
        ]
        choice = self.choice
        return f"calls {choice.takes_one} {choice.must_call} {dump_json(spelled).decode()}"

    def compile(self) -> Grammar:
        """Compile the grammar; raise RejectedError naming the tool whose schema is invalid."""
        offered = self._offered_tools()
        try:
            return self._compile_calls(offered)
        except RejectedError:
            # One by one, to name the tool at fault and to loosen those that are not strict.
            return self._compile_calls(tuple(self._try_tool(tool) for tool in offered))

    def _offered_tools(self) -> tuple[ToolSpec, ...]:
        offered = callable_tools(self.tools, self.choice)
        if not offered:
            message = "tool_choice asks for a call, but the request has no tool to call"
            raise RejectedError(message, code="invalid_value", param="tool_choice")
        size_bytes = sum(len(dump_json(t.parameters)) + len(t.rules) for t in offered)
        if size_bytes > CALL_SCHEMAS_BYTES_MAX:
            message = f"the schemas of all tools exceed {CALL_SCHEMAS_BYTES_MAX} bytes"
            raise RejectedError(message, code="invalid_function_parameters", param="tools")
        return tuple(self._check_tool(tool) for tool in offered)

    def _check_tool(self, tool: ToolSpec) -> ToolSpec:
        try:
            check_schema(tool.parameters)
        except RejectedError as error:
            return self._loosen_tool(tool, error)
        return tool

    def _try_tool(self, tool: ToolSpec) -> ToolSpec:
        try:
            self._compile_calls((tool,))
        except RejectedError as error:
            return self._loosen_tool(tool, error)
        return tool

    def _loosen_tool(self, tool: ToolSpec, error: RejectedError) -> ToolSpec:
        """Allow any object as the arguments of a tool that need not be strict."""
        if tool.is_strict or self.choice.must_call:
            if error.param in ("tools", "tool_choice"):
                raise error
            reason = without_place(reason_of(error))  # the place is in our grammar
            raise tool_refusal(tool.name, reason) from None
        return replace(tool, parameters={"type": "object"})

    def _compile_calls(self, offered: tuple[ToolSpec, ...]) -> Grammar:
        expression = self.tokenizer.call_grammar(offered, self.choice)
        return self.compiler.compile_expression(expression)


T = TypeVar("T")
_Key = tuple[TenantId, bytes]  # per tenant: compile times would reveal other tenants' formats


def _threads(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(GRAMMAR_WORKERS, thread_name_prefix=name)


@dataclass(slots=True, eq=False)
class AnswerGrammars:
    """Compiled grammars of a node; used on its event loop."""

    compiler: Compiler
    tokenizer: ChatTokenizer
    _compilers: ThreadPoolExecutor = field(default_factory=lambda: _threads("compile"))
    _masks: ThreadPoolExecutor = field(default_factory=lambda: _threads("mask"))
    _kept: OrderedDict[_Key, Grammar] = field(default_factory=OrderedDict)
    _compiling: dict[_Key, asyncio.Task[Grammar]] = field(default_factory=dict)
    _waiting_count: int = 0

    async def begin(self, request: GenerateRequest, begun: str) -> AnswerMatcher | None:
        """Return a matcher for the answer that its prompt has `begun`, with other nodes' tokens.

        Raise RejectedError for a format that cannot be enforced. None: the answer is free.
        """
        matcher, resume = await self._matcher(request, begun), request.resume
        if matcher is not None and resume is not None and resume.answer_ids:
            await self._run(lambda: matcher.replay(resume.answer_ids))
        return matcher

    async def _matcher(self, request: GenerateRequest, begun: str) -> AnswerMatcher | None:
        output, choice = request.sampling.output, request.calls
        may_call = bool(request.tools) and request.reads_calls
        if choice.must_call:
            return await self._forced_matcher(request, begun)
        if may_call and self._binds_whole(request):
            return AnswerMatcher(await self._calls(request), self._masks)
        rule = await self._call_rule(request) if may_call else None
        is_bound = rule is not None and rule.grammar is not None
        # A call quoted in a thought would be enforced, and so become a real call.
        barred_ids = self.tokenizer.call_ids if is_bound else frozenset[int]()
        if output is None:
            if not is_bound:
                return None
            marks, beginning = self._thought(begun)
            return AnswerMatcher(None, self._masks, marks, beginning, rule, barred_ids)
        _require_end(request.sampling)
        output.check()
        key = f"{output.kind.value} {output.is_strict} {output.source}"
        grammar = await self._grammar(request.tenant, key, lambda: self.compiler.compile(output))
        if request.messages is None:  # such an answer is all text
            return AnswerMatcher(grammar, self._masks)
        marks, beginning = self._thought(begun)
        return AnswerMatcher(grammar, self._masks, marks, beginning, rule, barred_ids)

    def _binds_whole(self, request: GenerateRequest) -> bool:
        """Return whether calls constrain the whole answer, as no single token begins one.

        An output format does not cover calls, which are then unconstrained.
        """
        sampling = request.sampling
        is_free = sampling.output is not None or sampling.ignore_eos
        return self.tokenizer.format.messages is not None and request.calls.is_bound and not is_free

    async def _forced_matcher(self, request: GenerateRequest, begun: str) -> AnswerMatcher:
        """Match an answer that must be calls; a dialect with headers binds all of it."""
        _require_end(request.sampling)
        grammar = await self._calls(request)
        if self.tokenizer.format.messages is not None:
            return AnswerMatcher(grammar, self._masks)
        marks, beginning = self._thought(begun)
        barred_ids = self.tokenizer.call_ids
        return AnswerMatcher(grammar, self._masks, marks, beginning, barred_ids=barred_ids)

    async def _call_rule(self, request: GenerateRequest) -> CallRule:
        """Return how an answer may call; only calls that begin with a token have a grammar."""
        choice, ids = request.calls, self.tokenizer.call_ids
        is_bound = choice.is_bound and bool(ids)
        return CallRule(ids, await self._calls(request) if is_bound else None)

    def _thought(self, begun: str) -> tuple[ThoughtMarks | None, Beginning]:
        marks = self.tokenizer.thought_marks
        return marks, beginning_of(marks, begun)

    async def _calls(self, request: GenerateRequest) -> Grammar:
        """Return the grammar of the calls that are allowed."""
        calls = CallGrammars(self.compiler, self.tokenizer, request.tools, request.calls)
        return await self._grammar(request.tenant, await self._run(calls.key), calls.compile)

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    async def _grammar(
        self, tenant: TenantId, name: str, compile_: Callable[[], Grammar]
    ) -> Grammar:
        """Return the kept grammar of this name, or compile it once for all waiting turns."""
        key = (tenant, blake2b(name.encode("utf-8", "replace"), digest_size=32).digest())
        grammar = self._kept.get(key)
        if grammar is None:
            grammar = await self._compile_once(key, compile_)
            self._kept[key] = grammar
        self._kept.move_to_end(key)
        while len(self._kept) > GRAMMARS_KEPT_MAX:
            self._kept.popitem(last=False)
        return grammar

    async def _compile_once(self, key: _Key, compile_: Callable[[], Grammar]) -> Grammar:
        if self._waiting_count >= GRAMMARS_COMPILING_MAX:
            message = f"{GRAMMARS_COMPILING_MAX} turns already wait for output formats to compile"
            raise OverloadedError(message)
        self._waiting_count += 1
        try:
            task = self._compiling.get(key)
            if task is None:
                task = self._compiling[key] = asyncio.create_task(self._compile(compile_))
                task.add_done_callback(lambda done: self._forget(key, done))
            return await asyncio.shield(task)
        finally:
            self._waiting_count -= 1

    def _forget(self, key: _Key, task: asyncio.Task[Grammar]) -> None:
        del self._compiling[key]
        if not task.cancelled():
            task.exception()  # retrieve it: perhaps no turn waits any more

    async def _compile(self, compile_: Callable[[], Grammar]) -> Grammar:
        # Slow only once, and not counted against this grammar.
        await self._run(self.compiler.vocabulary)
        try:
            async with asyncio.timeout(GRAMMAR_COMPILE_S):
                return await self._run(compile_)
        except TimeoutError:
            reason = f"it takes more than {GRAMMAR_COMPILE_S:g} s to compile"
            raise refusal(reason) from None

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compilers, work)


def _require_end(sampling: Sampling) -> None:
    if sampling.ignore_eos:
        message = "drop ignore_eos: an answer with an output format ends where the format does"
        raise RejectedError(message, code="invalid_format", param=PARAM)
