"""Prove at start-up that a stored agent really comes back: save, forget, restore, compare.

Runs the real path with the real model under a tenant of its own and erases what it made.
Several caches of this kind were shipped without ever having been read back.
"""

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from fabric.control.node_calls import SelfTest
from fabric.errors import FabricError, RejectedError, RetryElsewhereError, RetryLaterError
from fabric.ids import SELF_TEST_TENANT, AgentId, OperationId
from fabric.limits import BLOCK_TOKENS
from fabric.turn.generation import (
    Admitted,
    CacheTier,
    Delta,
    Event,
    Failed,
    Finished,
    GenerateRequest,
    Identity,
    IdentityKind,
    Sampling,
)
from node.store.posix_disk import DiskError

if TYPE_CHECKING:
    from node.node import Node

_log = logging.getLogger(__name__)
SAVING = "saving"  # causes of trouble
SELF_TEST = "self-test"
_TURNS = 2

AGENT = AgentId("selftest")
_ANSWER_TOKENS = 8
_WORDS = "one two three four five six seven eight nine ten eleven twelve"


async def run_self_test(node: "Node") -> SelfTest:
    """Find out whether an agent answers the same after its memory went through the disk.

    Memory that comes back wrong is not used any more. Where the disk refuses, or others run
    meanwhile, nothing is known: the node says so, and `node.tiers.flusher` repeats the test.
    """
    began = node.clock.monotonic_s()
    if node.problem is not None:
        found: tuple[bool | None, str] = False, f"served without reuse: {node.problem}"
    else:
        found = await _try(node)
    passed, detail = found
    node.self_test = SelfTest(bool(passed), detail, node.clock.monotonic_s() - began)
    node.is_tested = passed is not None
    if passed is False:
        node.problem = node.problem or detail
    if passed is None:
        node.troubles[SELF_TEST] = f"the self-test could not tell: {detail}"
    else:
        node.troubles.pop(SELF_TEST, None)
    if not passed:
        _log.error("self-test: %s", detail)
    return node.self_test


async def _try(node: "Node") -> tuple[bool | None, str]:
    """Return whether the agent came back, None if nobody can say, and what was found."""
    turns_before = node.turns_begun
    try:
        await _clean_up(node)  # what an earlier attempt left
        await _render_once(node)
        passed, detail = await _compare(node)
        await _clean_up(node)
    except (DiskError, RetryLaterError, RetryElsewhereError) as error:
        reason = error.reason if isinstance(error, DiskError) else error.message
        return None, reason
    except FabricError as error:
        return False, f"{error.code}: {error.message}"
    if passed is False and node.turns_begun > turns_before + _TURNS:
        return None, f"{detail} beside other turns"  # whose batches round otherwise
    return passed, detail


async def _clean_up(node: "Node") -> None:
    """Leave nothing of the agent; raise DiskError."""
    agent = node.table.get((SELF_TEST_TENANT, AGENT))
    if agent is None:
        return
    saved = agent.saved
    if saved is not None:
        refs = await node.in_worker(lambda: node.store.erase_record(SELF_TEST_TENANT, AGENT, saved))
        node.table.remove(agent.key)  # its blocks are let go of, whether the disk removes them
        await node.in_worker(lambda: node.store.erase_blocks(refs))
        return
    if not await node.in_worker(lambda: node.store.settle(SELF_TEST_TENANT, AGENT)):
        message = "a record of the self-test stays"
        raise DiskError(message)
    node.table.remove(agent.key)


async def _compare(node: "Node") -> tuple[bool | None, str]:
    _, first = await _ask(node)
    agent = node.table.get((SELF_TEST_TENANT, AGENT))
    if agent is None or not agent.is_durable:
        return None, node.troubles.get(SAVING, "the agent was not saved")
    agent.cache = None
    admitted, second = await _ask(node)
    if admitted.cache is not CacheTier.DISK:
        # Nothing wrong was read, and perhaps nothing could be.
        return None, f"expected a restore from disk, got {admitted.cache}"
    if admitted.cached_tokens != node.usable_prefix(admitted.prompt_tokens - 1):
        return None, f"restored {admitted.cached_tokens} of {admitted.prompt_tokens} tokens"
    if first != second:
        return False, "the restored agent answers differently"
    return True, f"restored {admitted.cached_tokens} tokens and got the same answer"


async def _render_once(node: "Node") -> None:
    """Compile the chat template, which nobody's first turn shall wait for."""
    with suppress(RejectedError):  # one that takes no such message is tried by the first turn
        await node.in_worker(
            lambda: node.tokenizer.render([{"role": "user", "content": _WORDS}], None, {})
        )


def _prompt(node: "Node") -> str:
    """Return words, on a grid for more than one block; for half of a small context at most."""
    prompt = " ".join([_WORDS] * 6)
    tokens_min = BLOCK_TOKENS + 1 if node.settings.exact_chunks else 1
    while len(node.tokenizer.encode(prompt).ids) <= tokens_min:
        prompt = f"{prompt} {prompt}"
    while len(node.tokenizer.encode(prompt).ids) > node.context_tokens_max // 2:
        prompt = prompt[: len(prompt) // 2]
    return prompt


async def _ask(node: "Node") -> tuple[Admitted, list[tuple[str, float]]]:
    request = GenerateRequest(
        operation=OperationId("selftest-1"),
        tenant=SELF_TEST_TENANT,
        identity=Identity(IdentityKind.AGENT, AGENT),
        # Log probabilities make the comparison bit-exact instead of merely equal in words.
        sampling=Sampling(max_tokens=_ANSWER_TOKENS, logprobs=1, ignore_eos=True),
        prompt=_prompt(node),
    )
    admitted: Admitted | None = None
    answer: list[tuple[str, float]] = []
    last: Event | None = None
    async for event in node.generate(request):
        last = event
        if isinstance(event, Admitted):
            admitted = event
        elif isinstance(event, Delta):
            answer += [(entry.token, entry.logprob) for entry in event.logprobs]
    if isinstance(last, Failed) and last.code == FabricError.code:
        raise FabricError(last.message)
    if not isinstance(last, Finished):  # cancelled, handed over for its memory, or refused midway
        message = last.message if isinstance(last, Failed) else "its turn did not come to an end"
        raise RetryLaterError(message)
    if admitted is None or not answer:
        message = "no answer"
        raise FabricError(message)
    return admitted, answer
