"""The monitoring key: metrics, nodes and events, and nothing else."""

import pytest

from fabric.keys import OPERATOR_HEADER
from fabric.settings import RouterSettings
from router.app import describe_api
from router.cli.data_folder import DataFolder
from router.http.auth import WATCHED_PATHS
from router.http.forwarded import Forwarding, Principal
from tests.router.rig import KEY, OPERATOR_KEY, rig
from tests.router.sse_reader import following

pytestmark = pytest.mark.anyio
WATCH = "a-key-that-only-watches"
SETTINGS = RouterSettings(api_keys={"one": KEY}, loopback_without_key=True, takeover_after_s=20.0)
ROUTES = sorted(
    (method.upper(), path)
    for path, methods in describe_api()["paths"].items()
    for method in methods
)


def watching(fabric):
    return fabric.http(WATCH, operates=False)


async def test_metrics_nodes_and_events_are_shown():
    async with rig("a", settings=SETTINGS, watch_key=WATCH) as fabric:
        await fabric.chat("hello", agent="mira", http=fabric.http(KEY))
        http = watching(fabric)
        metrics, nodes = await http.get("/metrics"), await http.get("/v1/nodes")
        async with following(http) as events:
            (snapshot,) = await events.until("snapshot")
        by_header = await fabric.http(operates=False).get(
            "/metrics", headers={OPERATOR_HEADER: WATCH}
        )
    assert (metrics.status_code, by_header.status_code) == (200, 200)
    assert "macfabric_node_up" in metrics.text
    assert nodes.json()["data"][0]["host"] == "127.0.0.1"
    assert [agent["id"] for agent in snapshot.data["agents"]] == ["mira"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_other_requests_are_refused(method, path):
    """This holds on the router's own machine, too, which needs no key."""
    shown = path.replace("{agent}", "mira").replace("{node}", "node-a")
    async with rig("a", settings=SETTINGS, watch_key=WATCH) as fabric:
        if method == "GET" and path == "/v1/events":
            return  # a stream without an end, tested above
        answer = await watching(fabric).request(method, shown)
    if method in ("GET", "HEAD") and path in WATCHED_PATHS:
        assert answer.status_code == 200
    else:
        assert answer.status_code == 403, answer.text
        assert method == "HEAD" or "the monitoring key only opens" in answer.text


@pytest.mark.parametrize("path", ["/v1/nodes/", "//v1/nodes", "/v1/agents/../nodes", "/V1/nodes"])
async def test_other_spellings_of_a_path_are_refused(path):
    async with rig("a", settings=SETTINGS, watch_key=WATCH) as fabric:
        answer = await watching(fabric).get(fabric.url + path)
    assert answer.status_code in (200, 403)
    assert answer.status_code == 403 or str(answer.url.path) == "/v1/nodes"


async def test_key_for_watching_is_no_operators_key_beside_a_tenants():
    async with rig("a", settings=SETTINGS, watch_key=WATCH) as fabric:
        mixed = await fabric.http(KEY, operates=False).post(
            "/v1/nodes/node-a/drain", headers={OPERATOR_HEADER: WATCH}
        )
        other = await fabric.http(WATCH, operates=False).post(
            "/v1/nodes/node-a/drain", headers={OPERATOR_HEADER: OPERATOR_KEY}
        )
        ready = fabric.fleet.ready()
    assert mixed.status_code == 401
    assert other.status_code in (202, 401)
    assert len(ready) == (1 if other.status_code == 401 else 0)


async def test_without_a_monitoring_key_none_is_accepted():
    async with rig("a", settings=SETTINGS) as fabric:
        answer = await watching(fabric).get("/metrics")
    assert answer.status_code == 401


def test_standby_forwards_that_a_caller_only_watches():
    proofs = Forwarding(b"k" * 32)
    caller = Principal(None, "watcher", only_watches=True)
    headers = proofs.headers(caller, "GET", "/v1/nodes")
    scope = {"method": "GET", "path": "/v1/nodes", "query_string": b""}
    assert proofs.caller(scope, headers) == caller
    whole = Principal(None, "ops")
    headers = proofs.headers(whole, "GET", "/v1/nodes")
    assert proofs.caller(scope, headers) == whole


def test_key_outlives_restarts_and_is_the_owners_alone(tmp_path):
    folder = DataFolder(tmp_path)
    key = folder.watch_key()
    assert len(key) >= 32
    assert DataFolder(tmp_path).watch_key() == key
    folder.forget_run()
    assert folder.watch_key() == key
    path = tmp_path / "watch.key"
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o644)
    assert folder.watch_key() is None
