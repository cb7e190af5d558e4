"""The router's working parts, put together once; every API and background task shares them."""

import asyncio
from dataclasses import dataclass

from fabric.settings import RouterSettings
from router.erasures import Erasures
from router.fleet import Fleet
from router.migrations import Migrations
from router.recovery import Recovery
from router.telemetry import Telemetry
from router.turns import Turns


@dataclass(frozen=True, slots=True)
class Services:
    """One of each."""

    fleet: Fleet
    telemetry: Telemetry
    migrations: Migrations
    recovery: Recovery
    erasures: Erasures
    turns: Turns

    async def run(self) -> None:
        """Beat, recover and sweep until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.fleet.membership.run())
                tasks.create_task(self._tend())
        finally:
            await self.migrations.close()

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(self.fleet.membership.beat_s)
            await self.recovery.round()
            await self.erasures.sweep()


def assemble(fleet: Fleet, settings: RouterSettings) -> Services:
    """Build all parts around a fleet."""
    telemetry = Telemetry()
    migrations = Migrations(fleet, telemetry)
    recovery = Recovery(fleet, migrations)
    return Services(
        fleet=fleet,
        telemetry=telemetry,
        migrations=migrations,
        recovery=recovery,
        erasures=Erasures(fleet, migrations),
        turns=Turns(fleet, migrations, recovery, telemetry, settings.takeover_after_s),
    )
