"""Bounded map of agents to the last epoch given out for them."""

from collections import OrderedDict

from fabric.ids import AgentId, AgentKey, TenantId


class EpochMap:
    """Epochs by agent, which only rise; the tenant with the most agents loses its oldest first."""

    def __init__(self, agents_max: int) -> None:
        self._agents_max = agents_max
        self._by_tenant: dict[TenantId, OrderedDict[AgentId, int]] = {}
        self._count = 0

    def last(self, key: AgentKey) -> int:
        """Return the highest epoch noted for an agent; 0 if none was."""
        epochs = self._by_tenant.get(key[0])
        return epochs.get(key[1], 0) if epochs is not None else 0

    def note(self, key: AgentKey, epoch: int) -> None:
        """Record `epoch`, unless a higher one is recorded already."""
        tenant, agent = key
        epochs = self._by_tenant.setdefault(tenant, OrderedDict())
        self._count += agent not in epochs
        epochs[agent] = max(epoch, epochs.pop(agent, 0))
        if self._count > self._agents_max:
            largest = max(self._by_tenant.values(), key=len)
            largest.popitem(last=False)
            self._count -= 1
