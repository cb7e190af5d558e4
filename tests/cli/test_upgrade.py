"""`macfabric upgrade`: the order of its steps, where it stops, and where it continues."""

import json
import shutil
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fabric.hosting.installed_code import installed_code
from router.cli import upgrade
from router.cli.code_check import require_startable
from router.cli.data_folder import DataFolder
from tests.support.error_codes import ROOT

NAMES = ("node-a", "node-b", "node-c")
NEW = installed_code("node")


class Cluster:
    """Nodes and a router that run old code until they restart, behind their HTTP API."""

    def __init__(self, names=NAMES):
        self.rows = {name: self._row(name) for name in names}
        self.router = {"object": "router", "role": "sole", "process": "one"}
        self.router["code"] = "old"
        self.steps = []
        self.broken = {}  # a node's failure after its next restart
        self.code = NEW  # of restarted processes
        self.stuck = ()
        self.old_polls = 0  # polls that still show a restarting node's old process
        self._late = []  # restarts that polls do not show yet
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                length = int(self.headers.get("content-length", 0))
                self.rfile.read(length)
                self._reply(cluster.change(self.path))

            def do_GET(self):
                cluster.show_restarts(is_poll=self.path.startswith("/v1/nodes"))
                rows = list(cluster.rows.values())
                nodes = {"object": "list", "data": rows, "has_more": False}
                self._reply(nodes if self.path.startswith("/v1/nodes") else cluster.router)

            def _reply(self, answer):
                raw = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _row(self, name):
        row = {"name": name, "state": "ready", "health": "alive", "incarnation": 7, "agents": 2}
        test = {"passed": True, "detail": "came back", "seconds": 0.1}
        build = {"code": "old"}
        return row | {"fingerprint": "f", "self_test": test, "build": build, "drain": None}

    def change(self, path):
        *_, name, verb = path.split("/")
        self.steps.append((verb, name))
        if name == "router":
            self.router |= {"code": installed_code("router"), "process": "two"}
            return self.router
        row = self.rows[name]
        if verb == "drain":
            drain = {"node": name, "state": "drained", "agents_moved": 2, "agents_left": 0}
            stuck = [{"id": each, "message": "no room"} for each in self.stuck]
            more = {"state": "stuck", "agents_left": len(stuck), "stuck": stuck} if stuck else {}
            row |= {"state": "draining", "drain": drain | more}
            return row["drain"]
        if verb == "undrain":
            row |= {"state": "ready", "drain": None}
        elif name in self.broken:
            row |= {"state": "failed", "health": "expired", "failure": self.broken[name]}
        else:
            new = {"incarnation": row["incarnation"] + 1, "build": {"code": self.code}}
            self._late.append((row, new, [self.old_polls]))
        return {"node": name, "state": row["state"]}

    def show_restarts(self, *, is_poll):
        """Show restarts once enough polls have shown the old process."""
        for late in list(self._late):
            row, new, polls = late
            if polls[0] <= 0:
                row |= new
                self._late.remove(late)
            polls[0] -= is_poll

    def repair(self, name):
        """Start a failed node with the installed code."""
        del self.broken[name], self.rows[name]["failure"]
        build = {"code": NEW}
        self.rows[name] |= {"state": "draining", "health": "alive", "incarnation": 9}
        self.rows[name]["build"] = build

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(upgrade, "POLL_S", 0.01)
    monkeypatch.setattr(upgrade, "require_startable", lambda package: None)  # tested below
    fake = Cluster()
    yield fake
    fake.close()


def restart_steps(name):
    return [("drain", name), ("restart", name), ("undrain", name)]


def record(tmp_path):
    return DataFolder(tmp_path / "data").upgrade


def test_nodes_are_upgraded_one_after_the_other_and_then_the_router(run, cluster):
    status, out, err = run("upgrade", "--url", cluster.url)

    nodes = [step for name in NAMES for step in restart_steps(name)]
    assert (status, cluster.steps) == (0, [*nodes, ("restart", "router")]), err
    assert "node-b: 2 agents moved" in err
    assert out.count("upgraded") == 4


def test_current_processes_are_left_alone_unless_forced(run, cluster):
    cluster.router["code"] = installed_code("router")
    for name in ("node-a", "node-c"):
        cluster.rows[name]["build"] = {"code": NEW}
    status, out, _ = run("upgrade", "--url", cluster.url, "--json")

    assert (status, cluster.steps) == (0, restart_steps("node-b"))
    results = {row["name"]: row["result"] for row in json.loads(out)["results"]}
    current = dict.fromkeys(("node-a", "node-c", "router"), "current")
    assert results == {"node-b": "upgraded", **current}
    run("upgrade", "--url", cluster.url, "--force", "--router")
    assert cluster.steps[-1] == ("restart", "router")


def test_only_the_named_nodes_are_upgraded(run, cluster):
    status, _, err = run("upgrade", "--url", cluster.url, "--nodes", "node-c", "--json")
    assert (status, cluster.steps) == (0, restart_steps("node-c"))
    assert {"name": "node-c", "event": "drained", "moved": 2, "stayed": 0} in [
        json.loads(line) for line in err.splitlines()
    ]
    status, _, err = run("upgrade", "--url", cluster.url, "--nodes", "node-x")
    assert (status, "known: node-a, node-b, node-c" in err) == (2, True)


def test_upgrade_stops_at_a_node_that_does_not_start_and_goes_on_there(run, cluster, tmp_path):
    (tmp_path / "data").mkdir()
    cluster.broken["node-b"] = "ValueError: no such setting"
    status, _, err = run("upgrade", "--url", cluster.url)

    assert status == 1
    assert "node-b does not start: ValueError: no such setting" in err
    assert "left as they are; still serving: node-a, node-c" in err
    assert "again to continue there" in err
    assert cluster.steps == [*restart_steps("node-a"), ("drain", "node-b"), ("restart", "node-b")]
    assert json.loads(record(tmp_path).read_text()) == {"node": "node-b"}
    cluster.repair("node-b")
    cluster.steps.clear()
    status, _, err = run("upgrade", "--url", cluster.url)

    assert status == 0, err
    assert cluster.steps == [("undrain", "node-b"), *restart_steps("node-c"), ("restart", "router")]
    assert not record(tmp_path).exists()


def test_router_that_does_not_come_back_is_explained(run, cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(upgrade, "SILENT_S", 0.05)
    log = DataFolder(tmp_path / "data").log("router")
    log.parent.mkdir(parents=True)
    log.write_text("ValueError: of the time before\n")

    def end(path):
        cluster.steps.append(path)
        cluster.router = {"object": "router", "role": "sole"}  # none answers
        with log.open("a") as file:
            file.write('Traceback (most recent call last):\n  File "x"\nRuntimeError: planted\n')
        return {}

    cluster.change = end
    limits = ("--router", "--wait", "0", "--timeout", "0.4")
    status, _, err = run("upgrade", "--url", cluster.url, *limits)

    assert status == 1
    assert err.count("router: RuntimeError: planted\n") == 1
    assert "did not come back (RuntimeError: planted), and clients get no answer" in err
    assert "The nodes keep their agents" in err
    assert "of the time before" not in err
    assert "Traceback" not in err


def test_node_drained_by_hand_stays_drained(run, cluster):
    cluster.rows["node-a"] |= {"state": "draining"}
    status, _, err = run("upgrade", "--url", cluster.url, "--nodes", "node-a")

    assert status == 0, err
    assert cluster.steps == [("drain", "node-a"), ("restart", "node-a")]


def test_agents_of_the_only_node_stay_on_its_disk(run, cluster):
    for name in ("node-b", "node-c"):
        cluster.rows[name] |= {"state": "expired", "health": "expired"}
    status, _, err = run("upgrade", "--url", cluster.url, "--nodes", "node-a")

    assert (status, cluster.steps) == (0, [("restart", "node-a")]), err
    assert "those on its disk stay there, and their turns get 503 meanwhile" in err
    status, _, err = run("upgrade", "--url", cluster.url)
    assert (status, "node-b is expired" in err) == (1, True)


def test_agents_that_cannot_move_are_named_and_stay(run, cluster):
    cluster.stuck = ("mira",)
    status, _, err = run("upgrade", "--url", cluster.url, "--nodes", "node-a")

    assert (status, cluster.steps) == (0, restart_steps("node-a"))
    assert "1 not moved (no room): those on its disk stay there" in err
    assert "what is in memory only is computed again" in err


def test_node_that_comes_back_with_other_code_stops_the_upgrade(run, cluster):
    cluster.code = "another"
    status, _, err = run("upgrade", "--url", cluster.url)

    assert (status, cluster.steps[-1]) == (1, ("restart", "node-a"))
    assert "node-a restarted with other code than installed here" in err


def test_state_of_the_process_before_is_not_shown_while_it_restarts(run, cluster):
    cluster.old_polls = 3
    for name in ("node-b", "node-c"):
        cluster.rows[name] |= {"state": "expired", "health": "expired"}
    status, _, err = run("upgrade", "--url", cluster.url, "--nodes", "node-a")

    assert (status, cluster.steps) == (0, [("restart", "node-a")]), err
    shown = [line.partition("] ")[2] for line in err.splitlines()]
    assert shown[-2] == "node-a: restarting its process"
    assert shown[-1].startswith("node-a: serves again after")


@pytest.fixture
def uncompilable_package(tmp_path, monkeypatch):
    """Code whose package cannot be compiled in a module that is imported late."""

    def build(package, module):
        root = tmp_path / "next-version"
        for name in ("fabric", package):
            shutil.copytree(ROOT / name, root / name)
        with (root / module).open("a") as file:
            file.write("def unfinished(:\n")
        monkeypatch.setattr(upgrade, "require_startable", partial(require_startable, root=root))

    return build


@pytest.mark.parametrize(
    ("package", "module"),
    [("node", "node/mlx/engine.py"), ("router", "router/turns/turns.py")],
)
def test_code_that_cannot_be_compiled_restarts_nothing(
    run, cluster, uncompilable_package, package, module
):
    uncompilable_package(package, module)
    for row in cluster.rows.values():
        row["build"] = {"code": "old" if package == "node" else NEW}
    status, _, err = run("upgrade", "--url", cluster.url)

    assert (status, cluster.steps) == (1, []), err
    assert f"the installed code of the {package} cannot start: SyntaxError" in err
    assert f"{module}, line" in err
    assert "Nothing was restarted: the fabric serves as before" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("package", ["node", "router"])
def test_installed_code_passes_the_check_of_upgrades(package):
    require_startable(package)


def test_other_ray_version_is_refused_before_anything_restarts(run, cluster):
    cluster.rows["node-b"]["build"] = {"code": "old", "ray": "1.0.0"}
    status, _, err = run("upgrade", "--url", cluster.url)

    assert (status, cluster.steps) == (1, [])
    assert "node-b runs 1.0.0" in err
    assert "macfabric down" in err


def test_changed_mlx_is_announced(run, cluster):
    cluster.rows["node-b"]["build"] = {"code": "old", "mlx": "0.0.1"}
    status, _, err = run("upgrade", "--url", cluster.url, "--nodes", "node-b")
    assert (status, "node-b: MLX changed" in err) == (0, True)


@pytest.mark.parametrize("seconds", ["-1", "4000"])
def test_wait_out_of_bounds_is_a_misuse(run, cluster, seconds):
    status, _, err = run("upgrade", "--url", cluster.url, "--wait", seconds)
    assert (status, "--wait must be" in err) == (2, True)


def test_node_that_takes_too_long_stops_the_upgrade(run, cluster):
    cluster.rows["node-a"] |= {"state": "ready"}
    cluster.change = lambda path: cluster.steps.append(path) or {"state": "drained"}
    status, _, err = run("upgrade", "--url", cluster.url, "--timeout", "0.1")
    assert (status, "did not come back within 0.1 s" in err) == (1, True)


def test_upgrade_needs_the_key_of_an_operator(run, cluster):
    for row in cluster.rows.values():
        del row["incarnation"]
    status, _, err = run("upgrade", "--url", cluster.url)
    assert (status, "operator" in err, cluster.steps) == (1, True, [])
