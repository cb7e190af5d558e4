"""Grammars of a node's turns: compiled apart from everything else, and kept for the next turn.

A compiler cannot be stopped, so what is given to it is bounded beforehand (`OutputFormat.check`),
and who waits for it gives up in time.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeVar

from fabric.errors import OverloadedError, RejectedError
from fabric.ids import TenantId
from fabric.limits import (
    GRAMMAR_COMPILE_S,
    GRAMMAR_WORKERS,
    GRAMMARS_COMPILING_MAX,
    GRAMMARS_KEPT_MAX,
)
from fabric.turn.generation import GenerateRequest
from fabric.turn.output_format import PARAM, OutputFormat
from node.grammar.answer_matcher import AnswerMatcher
from node.grammar.compiler import Compiler, Grammar, refusal
from node.grammar.thought import beginning_of
from node.mlx.chat_tokenizer import ChatTokenizer

T = TypeVar("T")
_Key = tuple[TenantId, bytes]  # how long it took would tell one tenant what others ask for


def _threads(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(GRAMMAR_WORKERS, thread_name_prefix=name)


@dataclass(slots=True, eq=False)
class Grammars:
    """One node's; lives on its event loop."""

    compiler: Compiler
    tokenizer: ChatTokenizer
    _compilers: ThreadPoolExecutor = field(default_factory=lambda: _threads("compile"))
    _masks: ThreadPoolExecutor = field(default_factory=lambda: _threads("mask"))
    _kept: OrderedDict[_Key, Grammar] = field(default_factory=OrderedDict)
    _waiting_count: int = 0

    async def begin(self, request: GenerateRequest, prompt: str) -> AnswerMatcher | None:
        """Return a matcher for the answer, which has taken what was answered elsewhere.

        Raise RejectedError where the format cannot be enforced. None: the request names none.
        """
        output, resume = request.sampling.output, request.resume
        if output is None:
            return None
        output.check()
        if request.sampling.ignore_eos:
            message = "an answer of a prescribed format ends where the format does: not ignore_eos"
            raise RejectedError(message, code="invalid_format", param=PARAM)
        grammar = await self._grammar(request.tenant, output)
        if request.messages is None:  # all of such an answer is text
            matcher = AnswerMatcher(grammar, self._masks)
        else:
            marks = self.tokenizer.thought_marks
            beginning = beginning_of(marks, self.tokenizer.behind_header(prompt))
            call_ids = self.tokenizer.call_ids if request.tools and request.reads_calls else None
            matcher = AnswerMatcher(grammar, self._masks, marks, beginning, call_ids)
        if resume is not None and resume.answer_ids:
            await self._run(lambda: matcher.replay(resume.answer_ids))
        return matcher

    def close(self) -> None:
        self._compilers.shutdown(wait=False, cancel_futures=True)
        self._masks.shutdown(wait=False, cancel_futures=True)

    async def _grammar(self, tenant: TenantId, output: OutputFormat) -> Grammar:
        key = (tenant, _digest(output))
        grammar = self._kept.get(key)
        if grammar is None:
            grammar = await self._compiled(output)
            self._kept[key] = grammar
        self._kept.move_to_end(key)
        while len(self._kept) > GRAMMARS_KEPT_MAX:
            self._kept.popitem(last=False)
        return grammar

    async def _compiled(self, output: OutputFormat) -> Grammar:
        if self._waiting_count >= GRAMMARS_COMPILING_MAX:
            message = f"{GRAMMARS_COMPILING_MAX} output formats wait to be compiled"
            raise OverloadedError(message)
        self._waiting_count += 1
        try:
            await self._run(self.compiler.vocabulary)  # takes long once, and is nobody's fault
            async with asyncio.timeout(GRAMMAR_COMPILE_S):
                return await self._run(lambda: self.compiler.compile(output))
        except TimeoutError:
            reason = f"it takes more than {GRAMMAR_COMPILE_S:g} s to compile"
            raise refusal(reason) from None
        finally:
            self._waiting_count -= 1

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._compilers, work)


def _digest(output: OutputFormat) -> bytes:
    spelled = f"{output.kind.value} {output.is_strict} {output.source}"
    return blake2b(spelled.encode("utf-8", "replace"), digest_size=32).digest()
