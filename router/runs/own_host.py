"""This router's fabric, as runs are performed on it."""

from dataclasses import dataclass

from fabric.errors import RetryLaterError
from fabric.ids import DEFAULT_TENANT, TenantId
from fabric.ports import Clock
from fabric.settings import RouterSettings
from router.api.turn_route import Desk
from router.runs.own_speaker import OwnSpeaker
from router.services import Services
from router.turns.model_check import ModelCheck


@dataclass(frozen=True, slots=True)
class OwnHost:
    """The router itself as a host of runs: what its routes use, without HTTP."""

    settings: RouterSettings
    services: Services
    desk: Desk

    @property
    def clock(self) -> Clock:
        return self.services.fleet.clock

    async def model(self, name: str | None) -> str:
        """Return the model that is meant, by default the first that there is."""
        models = ModelCheck(self.services.fleet)
        if name is None:
            served = await models.names()
            if not served:
                message = "no node is ready yet"
                raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")
            return served[0]
        resolved = await self.desk.names.resolve(name)
        await models.require(resolved)
        return resolved

    def speaker(self, tenant: TenantId, model: str) -> OwnSpeaker:
        return OwnSpeaker(self.services, self.desk, tenant, model)

    def is_known(self, tenant: TenantId) -> bool:
        """Say whether some request could come from this tenant."""
        keyless = self.settings.loopback_without_key and tenant == DEFAULT_TENANT
        return keyless or tenant in self.settings.api_keys
