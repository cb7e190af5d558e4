"""Prove at start-up that a stored agent really comes back: save, forget, restore, compare.

Runs the real path with the real model under a tenant of its own and erases what it made.
Several caches of this kind were shipped without ever having been read back.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from fabric.control import SelfTest
from fabric.errors import FabricError, RejectedError
from fabric.generation import (
    Admitted,
    CacheTier,
    Delta,
    GenerateRequest,
    Identity,
    IdentityKind,
    Sampling,
)
from fabric.ids import AgentId, OperationId, TenantId
from fabric.limits import BLOCK_TOKENS

if TYPE_CHECKING:
    from node.node import Node

TENANT = TenantId("_selftest")
AGENT = AgentId("selftest")
_ANSWER_TOKENS = 8
_WORDS = "one two three four five six seven eight nine ten eleven twelve"


async def run_self_test(node: "Node") -> SelfTest:
    """Return whether an agent answers the same after its memory went through the disk."""
    began = node.clock.monotonic_s()
    if node.problem is not None:
        return SelfTest(passed=False, detail=f"served without reuse: {node.problem}", seconds=0.0)
    try:
        await _render_once(node)
        passed, detail = await _compare(node)
    except FabricError as error:
        passed, detail = False, f"{error.code}: {error.message}"
    if not passed:
        node.problem = detail
    agent = node.table.get((TENANT, AGENT))
    if agent is not None:
        saved = agent.saved
        if saved is not None:
            await node.in_worker(lambda: node.store.erase(saved))
        node.table.remove(agent.key)
    return SelfTest(passed, detail, node.clock.monotonic_s() - began)


async def _compare(node: "Node") -> tuple[bool, str]:
    _, first = await _ask(node)
    agent = node.table.get((TENANT, AGENT))
    if agent is None or not agent.is_durable:
        return False, "the agent was not saved"
    agent.cache = None
    admitted, second = await _ask(node)
    if admitted.cache is not CacheTier.DISK:
        return False, f"expected a restore from disk, got {admitted.cache}"
    if admitted.cached_tokens != node.usable_prefix(admitted.prompt_tokens - 1):
        return False, f"restored {admitted.cached_tokens} of {admitted.prompt_tokens} tokens"
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
        tenant=TENANT,
        identity=Identity(IdentityKind.AGENT, AGENT),
        # Log probabilities make the comparison bit-exact instead of merely equal in words.
        sampling=Sampling(max_tokens=_ANSWER_TOKENS, logprobs=1, ignore_eos=True),
        prompt=_prompt(node),
    )
    admitted: Admitted | None = None
    answer: list[tuple[str, float]] = []
    async for event in node.generate(request):
        if isinstance(event, Admitted):
            admitted = event
        elif isinstance(event, Delta):
            answer += [(entry.token, entry.logprob) for entry in event.logprobs]
    await node.quiesce()
    if admitted is None or not answer:
        message = "no answer"
        raise FabricError(message)
    return admitted, answer
