from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fabric.control.node_calls import AgentList, AgentSketch, AgentView, TierBytes
from fabric.record.manifest import OwnerState
from router.fleet.directory import Directory, Holding

OWNED, SEALED, REPLICA = OwnerState.OWNED, OwnerState.SEALED, OwnerState.REPLICA
KEY = ("t", "alice")


def view(node, epoch, state=OWNED, agent="alice", group=None, tenant="t"):
    return AgentView(
        tenant=tenant,
        agent=agent,
        group=group,
        node=node,
        state=state,
        epoch=epoch,
        revision=0,
        tokens=1,
        blocks=1,
        bytes=TierBytes(1, 1),
        tiers=("disk",),
        busy=False,
        created_s=0.0,
        used_s=0.0,
    )


def listing(node, *views, changes=1, incarnation=1):
    return AgentList(node, incarnation, changes, tuple(AgentSketch(v, ()) for v in views))


def apply_list(directory, agents, requested_s):
    """Apply a list as `AgentReports` does; return the agents that the node no longer has."""
    is_first = not directory.has_list(agents.node)
    if not directory.begin_list(agents):
        return set()
    absent = directory.keys_absent_from(agents)
    for item in agents.agents:
        absent.pop(item.view.key, None)
        directory.put_listed(agents.node, item.view, requested_s, is_first_list=is_first)
    return directory.end_list(agents, absent, requested_s)


def noted_view(node, epoch, now_s, state=OWNED, group=None):
    return Holding(node, epoch, state, now_s, group)


AGENTS = st.sampled_from(["alice", "bob", "carol"])
STATES = st.sampled_from([OWNED, SEALED, REPLICA])
HELD = st.dictionaries(AGENTS, st.tuples(st.integers(1, 6), STATES), max_size=3)
HISTORIES = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.lists(HELD, min_size=1, max_size=4), min_size=1
)


@given(HISTORIES, st.data())
def test_highest_epoch_wins_under_any_order_and_duplication(histories, data):
    lists = [
        (
            listing(
                node,
                *(view(node, epoch, state, agent) for agent, (epoch, state) in held.items()),
                changes=changes,
                incarnation=1 + changes // 3,
            ),
            float(changes),
        )
        for node, steps in histories.items()
        for changes, held in enumerate(steps, 1)
    ]
    repeated = lists + data.draw(st.lists(st.sampled_from(lists), max_size=6))
    directory = Directory()
    for agents, requested_s in data.draw(st.permutations(repeated)):
        apply_list(directory, agents, requested_s)

    last = {node: steps[-1] for node, steps in histories.items()}
    for agent in ("alice", "bob", "carol"):
        claims = [
            (held[agent][0], held[agent][1] is OWNED, node)
            for node, held in last.items()
            if agent in held and held[agent][1] is not REPLICA
        ]
        owner = directory.owner(("t", agent))
        assert (owner is None) == (not claims)
        if owner is not None:
            assert (owner.epoch, owner.state is OWNED, owner.node) == max(claims)
        highest = max((h[agent][0] for h in last.values() if agent in h), default=0)
        following = directory.next_epoch(("t", agent))
        assert following > highest or following == 0 == highest
        doubtful = len(claims) > 1 or any(not owned for _, owned, _ in claims)
        assert (("t", agent) in directory.undecided_agents()) == doubtful


def test_released_owner_is_known_until_a_new_owner_appears():
    directory = Directory()
    replica = replace(view("b", 1, REPLICA), node="c")
    apply_list(directory, listing("b", replica), requested_s=1.0)
    assert directory.released_owner(KEY) is None, "its last owner was c"
    directory.note(KEY, noted_view("a", 2, now_s=2.0, state=REPLICA))
    assert directory.released_owner(KEY).node == "a", "the move is noted, but not listed yet"
    apply_list(directory, listing("a", view("a", 2, REPLICA)), requested_s=3.0)
    assert directory.released_owner(KEY).node == "a"
    assert (directory.agents_of_node("a"), directory.agents_of_node("b")) == ([KEY], [])
    directory.note(KEY, noted_view("b", 4, now_s=4.0))
    assert directory.released_owner(KEY) is None
    assert (directory.agents_of_node("a"), directory.agents_of_node("b")) == ([], [KEY])


def test_note_survives_older_list_but_not_newer_one():
    directory = Directory()
    directory.note(KEY, noted_view("a", 5, now_s=10.0))

    assert apply_list(directory, listing("a", changes=1), requested_s=9.0) == []
    assert directory.owner(KEY).epoch == 5
    apply_list(directory, listing("a", view("a", 4), changes=2), requested_s=9.5)
    assert directory.owner(KEY).epoch == 5
    assert apply_list(directory, listing("a", changes=3), requested_s=11.0) == [KEY]
    assert directory.owner(KEY) is None


def test_note_of_same_epoch_keeps_listed_view():
    directory = Directory()
    apply_list(directory, listing("a", view("a", 2)), requested_s=1.0)
    directory.note(KEY, noted_view("a", 2, now_s=2.0))

    assert directory.owner(KEY).view is not None


def test_late_response_does_not_lower_epoch():
    directory = Directory()
    directory.note(KEY, noted_view("a", 1, now_s=1.0))
    directory.note(KEY, noted_view("a", 3, now_s=2.0))  # moved away and back
    directory.note(KEY, noted_view("a", 1, now_s=3.0))  # a turn from before the moves

    assert directory.owner(KEY).epoch == 3
    apply_list(directory, listing("a", view("a", 2), incarnation=2), 4.0)
    assert directory.owner(KEY).epoch == 2, "a newer list may lower the epoch"


def test_evicted_agent_restarts_above_its_last_epoch():
    """The epoch was reported, not issued by this router."""
    directory = Directory()
    apply_list(directory, listing("a", view("a", 2)), requested_s=1.0)
    assert apply_list(directory, listing("a", changes=2), requested_s=2.0) == [KEY]

    assert directory.next_epoch(KEY) == 3
    assert directory.issued_epoch(KEY) == 0, "turns that ended there are not fenced"


def test_newer_reported_claim_fences_older_one():
    """An earlier router issued the epoch, so turns below it are fenced."""
    directory = Directory()
    apply_list(directory, listing("a", view("a", 1)), requested_s=1.0)
    assert directory.issued_epoch(KEY) == 0
    apply_list(directory, listing("b", view("b", 7)), requested_s=2.0)
    assert directory.issued_epoch(KEY) == 7

    late = Directory()  # the turn was sent earlier, and its reply follows the list
    apply_list(late, listing("b", view("b", 7)), requested_s=1.0)
    late.note(KEY, noted_view("a", 1, now_s=2.0))
    assert late.issued_epoch(KEY) == 7


def test_claim_of_a_migration_fences_no_turn():
    """The move includes all turns acknowledged before it."""
    directory = Directory()
    apply_list(directory, listing("a", view("a", 1, SEALED)), requested_s=1.0)
    directory.promise(KEY, 2)
    apply_list(directory, listing("b", view("b", 2)), requested_s=2.0)

    assert directory.issued_epoch(KEY) == 0
    apply_list(directory, listing("b", view("b", 3), changes=2), requested_s=3.0)
    assert directory.issued_epoch(KEY) == 3, "epoch 3 is another claim"


def test_replica_of_newer_claim_fences_no_turn():
    directory = Directory()
    apply_list(directory, listing("a", view("a", 1)), requested_s=1.0)
    apply_list(directory, listing("b", view("b", 7, REPLICA)), requested_s=2.0)

    assert directory.issued_epoch(KEY) == 0


def test_turn_below_erased_epoch_is_fenced():
    directory = Directory()
    apply_list(directory, listing("a", view("a", 1)), requested_s=1.0)
    assert directory.issued_epoch(KEY) == 0
    directory.floor = lambda key: 1_001 if key == KEY else 0  # reported by a node that joins later
    assert [directory.issued_epoch(KEY), directory.issued_epoch(("t", "bob"))] == [1_001, 0]


def test_late_list_of_earlier_version_is_ignored():
    directory = Directory()
    apply_list(directory, listing("a", view("a", 3), changes=7), requested_s=2.0)
    apply_list(directory, listing("a", changes=6), requested_s=3.0)

    assert directory.owner(KEY).epoch == 3


def test_restarted_node_may_reset_its_change_counter():
    directory = Directory()
    apply_list(directory, listing("a", view("a", 3), changes=70, incarnation=9), requested_s=1.0)
    directory.restart("a")
    apply_list(directory, listing("a", changes=1, incarnation=2), requested_s=2.0)

    assert directory.owner(KEY) is None


def test_next_epoch_is_above_all_known_epochs():
    directory = Directory()
    assert directory.next_epoch(KEY) == 0, "the node chooses the epoch of an unknown agent"
    apply_list(directory, listing("a", view("a", 3)), requested_s=1.0)
    assert directory.next_epoch(KEY) == 4
    apply_list(directory, listing("a", view("a", 3, REPLICA), changes=2), requested_s=2.0)
    assert directory.next_epoch(KEY) == 5, "an unreported owner may be at 4"


def test_next_epoch_is_above_erased_epochs():
    directory = Directory()
    directory.floor = lambda key: 1_001 if key == KEY else 0
    assert [directory.next_epoch(KEY), directory.next_epoch(("t", "bob"))] == [1_002, 0]
    apply_list(directory, listing("a", view("a", 1_002)), requested_s=1.0)
    assert directory.next_epoch(KEY) == 1_003


def test_groups_follow_their_conversations():
    directory = Directory()
    apply_list(
        directory,
        listing("a", view("a", 1, agent="team~2", group="team"), view("a", 1, agent="solo")),
        requested_s=1.0,
    )
    apply_list(directory, listing("b", view("b", 1, agent="team", group="team")), requested_s=1.0)

    assert [h.node for h in directory.group_owners("t", "team")] == ["b", "a"]
    assert directory.group_owners("other", "team") == []
    apply_list(directory, listing("b", changes=2), requested_s=2.0)
    assert [h.node for h in directory.group_owners("t", "team")] == ["a"]
    directory.forget(("t", "team~2"), "a")
    assert directory.group_owners("t", "team") == []
    assert directory._groups == {}


def test_tenants_are_isolated():
    directory = Directory()
    apply_list(
        directory, listing("a", view("a", 1), view("a", 1, tenant="u", agent="x")), requested_s=1.0
    )

    assert directory.agents("t") == ["alice"]
    assert directory.agents("u") == ["x"]
    assert directory.owner(("u", "alice")) is None


def test_reservation_lasts_until_its_last_turn_ends():
    directory = Directory()
    place = directory.reserve(KEY, "a", 0)
    place.turns_count += 2
    directory.release(KEY, place)
    assert directory.reservation(KEY) is place
    newer = directory.reserve(KEY, "b", 4)
    newer.turns_count += 1
    directory.release(KEY, place)
    assert directory.reservation(KEY) is newer
    directory.release(KEY, newer)
    assert directory.reservation(KEY) is None


def test_node_epoch_is_highest_owned_epoch():
    directory = Directory()
    apply_list(
        directory, listing("a", view("a", 3), view("a", 9, REPLICA, agent="bob")), requested_s=1.0
    )

    assert directory.epoch_of("a") == 3
    assert directory.epoch_of("b") == 0


def test_agents_are_counted_on_owner_or_reserved_node():
    directory = Directory()

    def counts():
        return [directory.agents_count(node) for node in "ab"]

    reserved = directory.reserve(KEY, "a", 1)
    reserved.turns_count = 1
    assert counts() == [1, 0], "before its node reports the agent"
    directory.note(KEY, noted_view("a", 1, 1.0))
    assert counts() == [1, 0], "counted once"
    directory.release(KEY, reserved)
    assert counts() == [1, 0]

    successor = directory.reserve(KEY, "b", 2)
    successor.turns_count = 1
    assert counts() == [0, 1]
    directory.release(KEY, successor)
    assert counts() == [1, 0], "the successor never started"

    apply_list(directory, listing("b", view("b", 3), changes=1), 5.0)
    assert counts() == [0, 1]
    apply_list(directory, listing("a", view("a", 1, REPLICA), changes=2), 6.0)
    assert counts() == [0, 1], "replicas are not counted"
    directory.forget(KEY, "b")
    directory.forget(KEY, "a")
    assert counts() == [0, 0]
