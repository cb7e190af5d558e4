from types import SimpleNamespace as Part

from tests.sim.epochs import Epochs, told


def test_within_a_routers_life_no_epoch_goes_back():
    seen = Epochs()
    seen.note("alice", router=1, epoch=3)
    seen.note("alice", router=1, epoch=2)

    assert seen.floor("alice", router=1, told_epoch=0) == 3


def test_another_agent_counts_its_own_epochs():
    seen = Epochs()
    seen.note("alice", router=1, epoch=3)

    assert seen.floor("auto-1", router=1, told_epoch=9) == 0


def test_a_new_router_must_know_only_what_it_was_told():
    seen = Epochs()
    seen.note("alice", router=1, epoch=3)

    assert seen.floor("alice", router=2, told_epoch=0) == 0
    assert seen.floor("alice", router=2, told_epoch=1) == 1, "the newer claim is away"
    assert seen.floor("alice", router=2, told_epoch=9) == 3
    seen.note("alice", router=2, epoch=2)
    assert seen.floor("alice", router=2, told_epoch=1) == 2


def test_the_erased_begin_anew():
    seen = Epochs()
    seen.note("alice", router=1, epoch=3)
    seen.clear()

    assert seen.floor("alice", router=1, told_epoch=3) == 0


def node(**epochs):
    records = [Part(tenant="red", agent=agent, epoch=epoch) for agent, epoch in epochs.items()]
    table = [Part(manifest=record) for record in records]
    return Part(node=Part(resources=Part(table=table)))


def test_a_router_was_told_what_the_nodes_that_it_heard_hold():
    nodes = {
        "a": node(alice=1, bob=4),
        "b": node(alice=2),
        "c": node(alice=3),
        "d": Part(node=None),
    }
    members = [Part(name=name, listed=None if name == "c" else (1, 1)) for name in nodes]
    fleet = Part(membership=Part(members=members))

    assert told(Part(services=Part(fleet=fleet)), nodes, "red") == {"alice": 2, "bob": 4}
    assert told(Part(services=Part(fleet=fleet)), nodes, "blue") == {}
    assert told(Part(services=None), nodes, "red") == {}
