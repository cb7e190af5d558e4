"""A node's use of its machine's memory and drive."""

import math

from fabric.control.usage_view import UsageView
from fabric.errors import FabricError
from fabric.hosting.chip import chip_name
from fabric.memory_plan import MemoryPlan
from fabric.ports import Clock, DriveSpace
from node.limits import DRIVE_POLL_S
from node.machine import process_bytes, ram_bytes, swap_bytes
from node.mlx import device
from node.runtime.workers import Workers
from node.store.block_store import BlockStore


class Usage:
    """Usage of one node."""

    def __init__(
        self,
        plan: MemoryPlan,
        disk_limit_bytes: int,
        blocks: BlockStore,
        workers: Workers,
        clock: Clock,
    ) -> None:
        self._plan = plan
        self._disk_limit_bytes = disk_limit_bytes
        self._blocks = blocks
        self._workers = workers
        self._clock = clock
        self._drive: DriveSpace | None = None
        self._measured_s = -math.inf
        self._is_measuring = False

    def view(self) -> UsageView:
        """Return the present usage; the drive's may be some seconds old."""
        self._measure_drive_soon()
        plan, drive = self._plan, self._drive
        return UsageView(
            process_bytes=process_bytes(),
            arrays_bytes=device.arrays_bytes(),
            pool_bytes=device.pool_bytes(),
            share_bytes=plan.share_bytes,
            weights_bytes=plan.weights_bytes,
            machine_bytes=ram_bytes(),
            swap_bytes=swap_bytes(),
            disk_limit_bytes=self._disk_limit_bytes,
            drive_bytes=drive.total_bytes if drive is not None else None,
            drive_free_bytes=drive.free_bytes if drive is not None else None,
            chip=chip_name(),
        )

    def _measure_drive_soon(self) -> None:
        """Measure the drive in a thread: an unplugged or remote one may hang."""
        now_s = self._clock.monotonic_s()
        if now_s - self._measured_s < DRIVE_POLL_S or self._is_measuring:
            return
        self._measured_s, self._is_measuring = now_s, True
        self._workers.begin(self._measure_drive)

    def _measure_drive(self) -> None:
        try:
            self._drive = self._blocks.drive()
        except (FabricError, OSError):
            self._drive = None
        finally:
            self._is_measuring = False
