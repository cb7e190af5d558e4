"""What the supervisor does when a process ends."""

import pytest

from router.cli.errors import CommandError
from router.cli.folder import DataFolder
from router.cli.supervisor import NODES, ROUTER, Plan, Supervisor

PORT = 4711


class FakeKeeper:
    """Tells prepared events and notes what is started."""

    def __init__(self):
        self.events, self.started, self.children = [], [], {}

    def start(self, name, argv, env, log, *, piped=False):
        self.started.append((name, argv))

    def next_event(self, timeout_s):
        return self.events.pop(0) if self.events else None


@pytest.fixture
def supervisor(tmp_path):
    plan = Plan(
        DataFolder(tmp_path),
        config=None,
        ray_address="127.0.0.1:1",
        environment={},
        host="127.0.0.1",
        port=0,
        nodes_expected=0,
        at_exit="flush",
        start_timeout_s=1.0,
    )
    made = Supervisor(plan, FakeKeeper(), None, lambda _: None, lambda: False)
    made.url, made.phases["ready"] = f"http://127.0.0.1:{PORT}", 0.0
    return made


def exited(name):
    return {"event": "exited", "name": name, "status": -9, "why": ""}


@pytest.mark.parametrize("name", [ROUTER, NODES])
def test_what_ends_is_started_again_in_the_same_step(supervisor, name):
    supervisor.keeper.events.append(exited(name))

    supervisor._step()

    assert [started for started, _ in supervisor.keeper.started] == [name]


def test_a_router_comes_back_where_its_clients_look_for_it(supervisor):
    supervisor.keeper.events.append(exited(ROUTER))

    supervisor._step()

    _, argv = supervisor.keeper.started[0]
    assert argv[argv.index("--port") + 1] == str(PORT)


def test_what_ends_again_and_again_is_given_up(supervisor):
    limit = supervisor.plan.restarts_max
    supervisor.keeper.events += [exited(ROUTER)] * (limit + 1)
    for _ in range(limit):
        supervisor._step()

    with pytest.raises(CommandError, match="router ended with status -9"):
        supervisor._step()

    assert len(supervisor.keeper.started) == limit
