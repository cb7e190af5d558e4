"""A real fabric lends shared prefixes to a node without agents."""

from router.client.client import Fabric
from tests.support.local_fabric import local_fabric
from tests.support.waiting import wait_until

KEYS = {"one": "key-of-tenant-number-one"}
SYSTEM = "Nobody knows why the library has a second bridge near the old harbour market. " * 24


def test_shared_prefixes_are_lent_to_new_node_and_returned_on_request(tmp_path):
    with local_fabric(tmp_path, "recall", "left", "right", api_keys=KEYS) as running:
        fabric = Fabric(running.url, KEYS["one"])
        agents = [fabric.agent(name) for name in ("mira", "otto")]
        assert running.http.post("/v1/nodes/right/drain").is_success
        for agent in agents:
            message = {"role": "user", "content": f"Hello, this is {agent.name}."}
            agent.generate(None, {"role": "system", "content": SYSTEM}, message, max_tokens=4)
        assert running.http.post("/v1/nodes/right/undrain").is_success
        leases = running.services["right"].node.moves.prefix_target.leases
        wait_until(lambda: leases.refs)
        for agent in agents:
            agent.share("agent")
        assert not leases.refs
