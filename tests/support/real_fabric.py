"""The fabric fixture of HTTP API tests, served by a real `macfabric up`.

Its router, nodes and Ray run in processes of their own. Tests that look into a node are skipped.
"""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import httpx2
import openai
import pytest

from fabric.keys import OPERATOR_HEADER
from tests.support.local_fabric import OPERATOR_KEY, REAL_UP, LocalFabric
from tests.support.up_fabric import running_up


class RealFabric(LocalFabric):
    """A `macfabric up` with the methods of the fabric that tests run in their process."""

    def __init__(  # the base's own __init__ starts nodes in this process
        self,
        folder: Path,
        model: str,
        names: list[str],
        api_keys: dict[str, str] | None = None,
        tokens_max: int | None = None,
        router: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        settings_of_router = {"api_keys": api_keys or {}, "operator_keys": {"ops": OPERATOR_KEY}}
        if tokens_max is not None:
            settings_of_router["completion_tokens_max"] = tokens_max
        if os.environ[REAL_UP] == "https":
            settings_of_router["tls"] = {"mode": "always"}
        with ExitStack() as running:  # a failure below stops the fabric
            up = running_up(folder, model, settings, settings_of_router | (router or {}), names)
            self.up = running.enter_context(up)
            self.url = self.up.url
            if self.url.startswith("https"):  # every HTTP client here trusts this authority
                patch = running.enter_context(pytest.MonkeyPatch.context())
                for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
                    patch.setenv(name, str(self.up.data / "ca.pem"))
            headers = {OPERATOR_HEADER: OPERATOR_KEY}
            self.http = httpx2.Client(base_url=self.url, timeout=120, headers=headers)
            self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
            self._running = running.pop_all()

    @property
    def services(self) -> NoReturn:  # type: ignore[override]
        """Skip the test: its nodes are in other processes."""
        pytest.skip("this test looks into a node of its own process")

    @property
    def model_name(self) -> str:
        """Name of the model the nodes serve."""
        return str(self.http.get("/v1/models").json()["data"][0]["id"])

    def drop_hot(self) -> NoReturn:
        """Skip the test: it needs access to a node."""
        self.services  # noqa: B018

    def restart(self, name: str) -> NoReturn:
        """Skip the test: it restarts a node of its own process."""
        self.services  # noqa: B018

    def restart_router(self) -> NoReturn:
        """Skip the test: it restarts a router of its own process."""
        self.services  # noqa: B018

    def stop(self) -> None:
        """Stop the fabric."""
        self.http.close()
        self.openai.close()
        self._running.close()
