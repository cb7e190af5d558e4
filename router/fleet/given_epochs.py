"""The last epoch given out for each agent; no tenant's many push out another's."""

from collections import OrderedDict

from fabric.ids import AgentId, AgentKey, TenantId


class GivenEpochs:
    """A bounded map of agents to epochs that only rise; who has most loses its oldest first."""

    def __init__(self, agents_max: int) -> None:
        self._agents_max = agents_max
        self._by_tenant: dict[TenantId, OrderedDict[AgentId, int]] = {}
        self._count = 0

    def last(self, key: AgentKey) -> int:
        """Return the highest epoch noted for an agent; 0 if there is none."""
        own = self._by_tenant.get(key[0])
        return own.get(key[1], 0) if own is not None else 0

    def note(self, key: AgentKey, epoch: int) -> None:
        """Remember that `epoch`, or a higher one before, was given out."""
        tenant, agent = key
        own = self._by_tenant.setdefault(tenant, OrderedDict())
        self._count += agent not in own
        own[agent] = max(epoch, own.pop(agent, 0))
        if self._count > self._agents_max:
            most = max(self._by_tenant.values(), key=len)
            most.popitem(last=False)
            self._count -= 1
