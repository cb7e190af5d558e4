"""Ray accepts only members of its fabric: it drops strangers and the packet that crashes it."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from router.supervise.processes import descendants, is_alive
from tests.cluster.conftest import start_ray
from tests.support.keys import make_keys

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
START_SYNC = "/ray.rpc.syncer.RaySyncer/StartSync"
CALL_S = 20.0
HANG_S = 180.0
PATIENCE_S = 10  # timeout of each of Ray's three attempts
PATIENCE = (
    "RAY_gcs_rpc_server_connect_timeout_s",
    "RAY_gcs_rpc_server_reconnect_timeout_s",
    "RAY_gcs_server_request_timeout_seconds",
)
DRIVER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
print("joined", len(ray.nodes()))
"""


@pytest.fixture(scope="module")
def ray_of_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    keeper, ray = start_ray(folder, ("node-a",))
    yield keeper, ray, folder
    ray.stop()
    keeper.close()


def ports_of(keeper, *programs):
    """List the ports of Ray's own servers."""
    processes = [Path(f"/proc/{p.pid}") for p in descendants([keeper.process.pid])]
    chosen = [p for p in processes if (p / "exe").readlink().name in programs]
    return [port for process in chosen for port in listening(process)]


def listening(process):
    """List the TCP ports on which a process listens."""
    sockets = set()
    for descriptor in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            sockets.add(str(descriptor.readlink()))
    rows = []
    for table in ("tcp", "tcp6"):
        rows += [line.split() for line in (process / "net" / table).read_text().splitlines()[1:]]
    listening_rows = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return sorted({int(row[1].rpartition(":")[2], 16) for row in listening_rows})


def channels(folder, tmp_path, target):
    """Yield channels that strangers may use, by name."""
    authority = (folder / "ca.pem").read_bytes()
    other = make_keys(tmp_path / "other").path
    yield "in the clear", grpc.insecure_channel(target)
    yield (
        "without a certificate",
        grpc.secure_channel(target, grpc.ssl_channel_credentials(authority)),
    )
    forged = grpc.ssl_channel_credentials(
        authority, (other / "member.key").read_bytes(), (other / "member.pem").read_bytes()
    )
    yield "with one of another fabric", grpc.secure_channel(target, forged)


def member(folder, target):
    files = [(folder / name).read_bytes() for name in ("ca.pem", "member.key", "member.pem")]
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(*files))


def start_sync(channel):
    """Send the packet without metadata that crashes Ray 2.60; return the reply."""
    call = channel.stream_stream(START_SYNC)
    try:
        list(call(iter([b""]), timeout=CALL_S))
    except grpc.RpcError as error:
        return error.code(), str(error.details())
    return None, ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_strangers_are_rejected_and_stop_no_process(ray_of_one, tmp_path):
    keeper, ray, folder = ray_of_one
    before = descendants([keeper.process.pid])
    host = ray.nodes[0].host
    ports = ports_of(keeper, "gcs_server", "raylet")
    assert int(ray.address.rpartition(":")[2]) in ports
    assert len(ports) >= 3

    for port in ports:
        for name, channel in channels(folder, tmp_path, f"{host}:{port}"):
            with channel:
                code, _ = start_sync(channel)
            assert code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}, (
                name,
                port,
            )
    time.sleep(1)
    assert [process for process in before if not is_alive(process)] == []


def test_member_connects(ray_of_one):
    _, ray, folder = ray_of_one
    with member(folder, ray.address) as channel:
        grpc.channel_ready_future(channel).result(CALL_S)


@pytest.mark.nightly
def test_driver_without_membership_is_rejected(ray_of_one, tmp_path):
    """The driver retries within its configured limits and exits."""
    _, ray, _ = ray_of_one
    no_credentials = {name: value for name, value in ray.environment.items() if "TLS" not in name}
    other = make_keys(tmp_path / "other").path
    other_credentials = ray.environment | {
        "RAY_TLS_SERVER_CERT": str(other / "member.pem"),
        "RAY_TLS_SERVER_KEY": str(other / "member.key"),
    }
    drivers = [
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, ray.address],
            env=environment | dict.fromkeys(PATIENCE, str(PATIENCE_S)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in (no_credentials, other_credentials)
    ]
    try:
        outputs = [driver.communicate(timeout=HANG_S) for driver in drivers]
    finally:
        for driver in drivers:
            driver.kill()
            driver.communicate()

    for driver, (out, error) in zip(drivers, outputs, strict=True):
        assert "joined" not in out
        assert driver.returncode == 1
        assert "Failed to connect to GCS" in error


def test_driver_with_membership_joins(ray_of_one):
    _, ray, _ = ray_of_one
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, ray.address],
        env=ray.environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert "joined 1" in done.stdout
