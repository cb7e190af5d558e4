"""Randomness from one seed: each process draws its own `secrets`."""

import random
import secrets
from contextlib import contextmanager
from unittest import mock

from tests.sim.loop import PROCESS


def stream(seed: int, name: str) -> random.Random:
    """Return the generator of one purpose, independent of all others."""
    return random.Random(f"{seed}:{name}")


def _source() -> random.Random:
    process = PROCESS.get()
    assert process is not None, "only processes draw secrets"
    return process.random


@contextmanager
def seeded_secrets():
    """Replace the system's randomness while the simulation runs."""
    with (
        mock.patch.object(secrets, "token_bytes", lambda n=32: _source().randbytes(n)),
        mock.patch.object(secrets, "token_hex", lambda n=32: _source().randbytes(n).hex()),
        mock.patch.object(secrets, "randbits", lambda n: _source().getrandbits(n)),
    ):
        yield
