"""Results of a node's start-up trials, shared within a process to halve a start.

The first start with a model and settings runs all trials. Later starts skip the timed prompt and
the saved and restored trial agent; trials that are repeated while the node runs are not skipped.

All nodes of a model use the forms of attention that its first one chose: under load, trials differ,
and so would the last bits of two nodes' answers.
"""

import asyncio

from fabric.control.node_calls import SelfTest
from node.mlx.packed_product import Forms, chosen_forms, use_forms
from node.node import Node
from node.runtime.identity import NodeIdentity
from node.service import NodeService

_passed: dict[tuple[bytes, str], SelfTest] = {}
_tokens_per_s: dict[tuple[bytes, str], float] = {}
_forms: dict[bytes, Forms] = {}


class KnownService(NodeService):
    """Node that reuses the start-up results of a node with equal settings."""

    def _build(self) -> Node:
        node = super()._build()
        tests, found = node.background.self_tests, _passed.get(_kind(node.resources.identity))
        if found is not None:

            async def use_known_result() -> SelfTest:
                del tests.run
                tests.found, tests.is_sure = found, True
                return found

            tests.run = use_known_result
        return node

    async def _measure_prefill(self) -> None:
        node = self.node
        kind, speed = _kind(node.resources.identity), node.resources.engine.prefill_speed
        if kind in _tokens_per_s:
            speed.start(1, 1 / _tokens_per_s[kind])
            await self._share_forms()
            return
        await super()._measure_prefill()
        await self._share_forms()
        if node.background.self_tests.found.passed:
            _passed[kind], _tokens_per_s[kind] = node.background.self_tests.found, speed.per_s

    async def _share_forms(self) -> None:
        fingerprint = self.node.resources.identity.fingerprint

        def share() -> None:
            use_forms(_forms.setdefault(fingerprint, chosen_forms()))

        await asyncio.wrap_future(self.node.resources.engine.call(share))


def _kind(identity: NodeIdentity) -> tuple[bytes, str]:
    return identity.fingerprint, repr(identity.settings)
