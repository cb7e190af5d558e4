from types import SimpleNamespace as Part

from tests.sim.epochs import Epochs, reported_epochs


def test_epoch_floor_never_decreases_within_one_router_life():
    seen = Epochs()
    seen.note("alice", router=1, epoch=3)
    seen.note("alice", router=1, epoch=2)

    assert seen.floor("alice", router=1, reported_epoch=0) == 3


def test_epoch_floor_is_kept_per_agent():
    seen = Epochs()
    seen.note("alice", router=1, epoch=3)

    assert seen.floor("auto-1", router=1, reported_epoch=9) == 0


def test_epoch_floor_of_a_new_router_follows_node_reports():
    seen = Epochs()
    seen.note("alice", router=1, epoch=3)

    assert seen.floor("alice", router=2, reported_epoch=0) == 0
    assert seen.floor("alice", router=2, reported_epoch=1) == 1, "the newer claim is away"
    assert seen.floor("alice", router=2, reported_epoch=9) == 3
    seen.note("alice", router=2, epoch=2)
    assert seen.floor("alice", router=2, reported_epoch=1) == 2


def test_erased_agent_has_no_epoch_floor():
    seen = Epochs()
    seen.note("alice", router=1, epoch=3)
    seen.clear()

    assert seen.floor("alice", router=1, reported_epoch=3) == 0


def node(**epochs):
    records = [Part(tenant="red", agent=agent, epoch=epoch) for agent, epoch in epochs.items()]
    table = [Part(manifest=record) for record in records]
    return Part(node=Part(resources=Part(table=table)))


def test_reported_epochs_are_those_of_listed_nodes():
    nodes = {
        "a": node(alice=1, bob=4),
        "b": node(alice=2),
        "c": node(alice=3),
        "d": Part(node=None),
    }
    members = [Part(name=name, listed=None if name == "c" else (1, 1)) for name in nodes]
    fleet = Part(membership=Part(members=members))

    assert reported_epochs(Part(services=Part(fleet=fleet)), nodes, "red") == {"alice": 2, "bob": 4}
    assert reported_epochs(Part(services=Part(fleet=fleet)), nodes, "blue") == {}
    assert reported_epochs(Part(services=None), nodes, "red") == {}
