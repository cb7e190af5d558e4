"""Join a Ray cluster as a driver, and keep trying while the cluster is still starting."""

import logging
import socket
import time
from collections.abc import Callable

from fabric.errors import FatalError
from fabric.hosting.ray_names import NAMESPACE

PORT_TIMEOUT_S = 1.0
PORT_POLL_S = 0.1
JOIN_POLL_S = 1.0
REPORT_S = 15.0  # between two reports of the same wait

_log = logging.getLogger("macfabric.node.launch")


def connect(
    address: str, deadline_s: float, report: Callable[[str], None] = lambda _: None
) -> None:
    """Join the Ray cluster at `address`; raise FatalError if that has failed by `deadline_s`.

    A busy machine accepts connections before it can be joined, so a failed join is retried.
    `report` gets the reason at once, and again every `REPORT_S` seconds.
    """
    reported_s = 0.0
    while True:
        reason = _failure_to_join(address)
        if reason is None:
            return
        now_s = time.monotonic()
        if now_s >= deadline_s:
            message = f"no Ray cluster answers at {address}: {reason}"
            raise FatalError(message)
        if not reported_s or now_s - reported_s >= REPORT_S:
            reported_s = now_s
            _log.info("waiting for Ray at %s: %s", address, reason)
            report(f"waiting for Ray at {address}: {reason}")
        time.sleep(PORT_POLL_S if isinstance(reason, _NoPort) else JOIN_POLL_S)


class _NoPort(str):
    """Reason for a failed join when nothing listens: retried soon, since a try is cheap."""

    __slots__ = ()


def _failure_to_join(address: str) -> str | None:
    """Try to join once; return why that failed, or None."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=PORT_TIMEOUT_S).close()
        except OSError as error:
            return _NoPort((error.strerror or str(error)).lower())
    import ray

    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING
        )
    except Exception as error:  # noqa: BLE001 - Ray raises plain Exception where it is too slow
        ray.shutdown()  # a partial connection would prevent the next try
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return None
