"""Divide a machine's memory: weights, agents' caches, prefill, MLX's pool, and the rest.

    working set of the GPU (of a machine without one: WORKING_SET_PART of its RAM)
      / nodes of this machine
        = weights + hot caches + prefill transients + pool + reserve

The working set is macOS's recommended limit for a GPU's arrays: the rest of the RAM is for the
system and other programs.
"""

from dataclasses import dataclass, replace
from typing import Final

from fabric.errors import FatalError
from fabric.limits import (
    DEVICE_BUFFERS_PART,
    DEVICE_POOL_BYTES,
    DEVICE_RESERVE_BYTES,
    HOT_BYTES_MIN,
    PREFILL_BYTES_MAX,
    PREFILL_BYTES_MIN,
    PREFILL_PART,
    WORKING_SET_PART,
)
from fabric.units import format_bytes

_POOL_PART: Final = 16  # of a node's share, at most


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory that a machine offers to all of its nodes."""

    ram_bytes: int
    gpu_bytes: int | None = None  # the recommended working set of its GPU; None: it has none
    buffers_max: int | None = None  # arrays that one process may hold on the GPU
    nodes_count: int = 1  # nodes of this fabric, with equal shares

    @property
    def working_set_bytes(self) -> int:
        """Bytes that the arrays of all of its nodes may occupy."""
        if self.gpu_bytes is not None:
            return self.gpu_bytes
        return int(self.ram_bytes * WORKING_SET_PART)

    @property
    def share_bytes(self) -> int:
        """Bytes that the arrays of one of its nodes may occupy."""
        return self.working_set_bytes // self.nodes_count


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Division of a node's share of memory."""

    share_bytes: int
    weights_bytes: int
    hot_bytes: int  # for agents' caches
    prefill_bytes: int  # for one chunk of a prompt: its scores, and the plain numbers it attends to
    pool_bytes: int  # of freed arrays that MLX keeps
    array_bytes_min: int = 0  # that one array of a cache counts as: their number is bounded, too

    def with_prefix(
        self, prefix_bytes: int, cache_bytes: int, context_tokens_max: int
    ) -> "MemoryPlan":
        """Return the plan with room for the plain numbers of the longest prefix that fits.

        `prefix_bytes` and `cache_bytes` are of one token: of the plain numbers that prefill reads
        at a time, and of an agent's packed cache. The room is taken from agents' caches.
        """
        room_bytes = self.prefill_bytes + self.hot_bytes + self._free_bytes
        tokens_count = min(context_tokens_max, room_bytes // (prefix_bytes + cache_bytes))
        needed_bytes = tokens_count * prefix_bytes
        if needed_bytes <= self.prefill_bytes:
            return self
        hot_bytes = min(self.hot_bytes, room_bytes - needed_bytes)
        return replace(self, prefill_bytes=needed_bytes, hot_bytes=hot_bytes)

    @property
    def _free_bytes(self) -> int:
        """Bytes of the share that no part takes."""
        parts_bytes = self.weights_bytes + self.hot_bytes + self.prefill_bytes + self.pool_bytes
        return max(0, self.share_bytes - parts_bytes - DEVICE_RESERVE_BYTES)

    @property
    def explanation(self) -> str:
        """Return the division in figures."""
        return (
            f"{format_bytes(self.share_bytes)} for this node: the model's weights "
            f"{format_bytes(self.weights_bytes)}, prefill {format_bytes(self.prefill_bytes)}, "
            f"MLX's pool {format_bytes(self.pool_bytes)}, reserve "
            f"{format_bytes(DEVICE_RESERVE_BYTES)}, agents' caches {format_bytes(self.hot_bytes)}"
        )


def plan_memory(
    machine: MachineMemory, weights_bytes: int, hot_bytes: int | None = None
) -> MemoryPlan:
    """Divide a node's share; `hot_bytes` is the operator's setting, None for all that is left.

    Raise FatalError, with the figures, for a model or caches that do not fit.
    """
    share_bytes = machine.share_bytes
    prefill_bytes = min(max(share_bytes // PREFILL_PART, PREFILL_BYTES_MIN), PREFILL_BYTES_MAX)
    pool_bytes = min(DEVICE_POOL_BYTES, share_bytes // _POOL_PART)
    taken_bytes = weights_bytes + prefill_bytes + pool_bytes + DEVICE_RESERVE_BYTES
    left_bytes = share_bytes - taken_bytes
    if hot_bytes is None:
        caches_bytes, least_bytes, what = left_bytes, HOT_BYTES_MIN, "at least"
    else:
        caches_bytes, least_bytes, what = hot_bytes, hot_bytes, "node.hot_bytes,"
    array_bytes_min = _array_bytes_min(machine, caches_bytes)
    plan = MemoryPlan(
        share_bytes, weights_bytes, caches_bytes, prefill_bytes, pool_bytes, array_bytes_min
    )
    if left_bytes < least_bytes:
        raise _does_not_fit(plan, machine, f"{what} {format_bytes(least_bytes)}", left_bytes)
    return plan


def _array_bytes_min(machine: MachineMemory, hot_bytes: int) -> int:
    if machine.buffers_max is None:
        return 0
    arrays_max = int(machine.buffers_max * DEVICE_BUFFERS_PART)
    return -(-max(0, hot_bytes) // arrays_max)


def _does_not_fit(
    plan: MemoryPlan, machine: MachineMemory, wanted: str, left_bytes: int
) -> FatalError:
    beside = f", shared by {machine.nodes_count} nodes" if machine.nodes_count > 1 else ""
    fewer = ", or fewer nodes on this machine" if machine.nodes_count > 1 else ""
    message = (
        f"model and caches do not fit: this machine has {format_bytes(machine.ram_bytes)} of RAM, "
        f"of which they may take {format_bytes(machine.working_set_bytes)}{beside}. Of "
        f"{format_bytes(plan.share_bytes)} the weights take {format_bytes(plan.weights_bytes)}, "
        f"prefill {format_bytes(plan.prefill_bytes)}, MLX's pool {format_bytes(plan.pool_bytes)}, "
        f"a reserve {format_bytes(DEVICE_RESERVE_BYTES)}: {format_bytes(max(0, left_bytes))} is "
        f"left for agents' caches, which need {wanted}. Choose a smaller model{fewer}, or set "
        "node.hot_bytes to less"
    )
    return FatalError(message, code="exceeds_memory")
