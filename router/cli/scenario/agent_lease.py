"""The agents of a run of the command line, leased from the router while the run goes on."""

import socket
import threading
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from router.cli.endpoint import Endpoint
from router.cli.errors import CommandError, FabricRefusedError
from router.limits import SCENARIO_LEASE_S
from router.scenario.given_edits import digest

RENEW_S = SCENARIO_LEASE_S / 3
_KEY_BYTES = 12


@dataclass(slots=True)
class AgentLease:
    """Keeps other runs away from this one's agents, and learns when that failed."""

    endpoint: Endpoint
    run: str
    journal: Path  # the same journal is the same run, in whichever process
    _agents: tuple[str, ...] = ()
    _lost: str = ""
    _ended: threading.Event = field(default_factory=threading.Event)
    _renewing: threading.Thread | None = None

    def take(self, agents: Iterable[str]) -> None:
        """Lease agents, in place of those leased before; raise CommandError where others run."""
        self._agents = tuple(agents)
        self._ask()
        if self._renewing is None:
            self._renewing = threading.Thread(target=self._renew, daemon=True)
            self._renewing.start()

    def require(self) -> None:
        """Raise CommandError once another run has the agents."""
        if self._lost:
            raise CommandError(self._lost)

    def release(self) -> None:
        """Let other runs have the agents; unreachable routers drop the lease by themselves."""
        self._ended.set()
        if self._renewing is not None:
            self._renewing.join()
            self._call("DELETE", f"{self._path}?key={self._key}", None)

    @property
    def _path(self) -> str:
        return f"/v1/scenarios/{quote(self.run, safe='')}/lease"

    @property
    def _key(self) -> str:
        place = (str(uuid.getnode()), socket.gethostname(), str(self.journal.absolute()))
        return digest(_KEY_BYTES, *place)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                self._ask()
            except CommandError as error:
                self._lost = str(error)
                return

    def _ask(self) -> None:
        self._call("POST", self._path, {"key": self._key, "agents": list(self._agents)})

    def _call(self, method: str, path: str, body: Any) -> None:
        """Send a request; only a refusal because of another run counts as a failure."""
        try:
            self.endpoint.call(method, path, body)
        except FabricRefusedError as error:
            if error.code == "agents_in_use":
                raise
        except CommandError:
            return  # nothing answers: the run itself finds out
