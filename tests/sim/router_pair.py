"""Two routers, seen as the one that clients reach: whichever is active."""

from tests.sim.router_host import ROUTER, RouterHost

STANDBY = "standby"


class RouterPair:
    """The routers of one fabric. Requests go to the active one, as a standby sends them there."""

    def __init__(self, world):
        self.name = ROUTER
        self.hosts = (RouterHost(world, ROUTER), RouterHost(world, STANDBY))
        self._last = self.hosts[0]

    @property
    def host(self):
        """The active router; without one, the last active, or a live one if that is dead."""
        active = [each for each in self.hosts if self._is_active(each)]
        if active:
            self._last = active[-1]
        elif self._last.process is not None and self._last.process.is_dead:
            living = [each for each in self.hosts if each.is_serving]
            self._last = living[0] if living else self._last
        return self._last

    def _is_active(self, host):
        if host.keeper is None or host.process.is_dead or host.process.is_frozen:
            return False
        return host.keeper.is_active

    def __getattr__(self, name):
        return getattr(self.host, name)

    @property
    def is_serving(self):
        """Whether a router is active: without one, no client is served."""
        return self._is_active(self.host)

    def boot(self):
        for host in self.hosts:
            host.boot()
