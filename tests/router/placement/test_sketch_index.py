from hypothesis import given
from hypothesis import strategies as st

from fabric.turn.sketch import common_pieces
from router.placement.sketch_index import HeadState, Match, SketchIndex


def chain(*pieces):
    """Make a sketch whose pieces depend on all earlier ones, as real ones do."""
    sketch, last = [], 7
    for piece in pieces:
        last = (last * 1_000_003 + piece + 1) % (1 << 64)
        sketch.append(last)
    return tuple(sketch)


SKETCHES = st.lists(st.integers(0, 2), max_size=8).map(lambda pieces: chain(*pieces))
STEPS = st.lists(
    st.tuples(
        st.sampled_from("xy"), st.sampled_from("abc"), st.integers(0, 4), st.none() | SKETCHES
    ),
    max_size=40,
)


@given(STEPS, SKETCHES)
def test_index_equals_linear_search(steps, query):
    index, model = SketchIndex(), {}
    for tenant, node, agent, sketch in steps:
        if sketch is None:
            index.remove(tenant, node, agent)
            model.pop((tenant, node, agent), None)
        else:
            index.put(tenant, node, agent, sketch)
            model[tenant, node, agent] = sketch

    for tenant in "xy":
        longest, whole = {}, {}
        for (owner, node, agent), sketch in model.items():
            if owner != tenant:
                continue
            common = common_pieces(sketch, query)
            longest[node] = max(longest.get(node, 0), common)
            if sketch and common == len(sketch):
                whole[node] = max(whole.get(node, (0, -1)), (common, agent))
        expected = {
            n: Match(count, whole.get(n, (0, None))[1]) for n, count in longest.items() if count
        }
        assert index.matches(tenant, query) == expected
    assert len(index) == sum(1 for sketch in model.values() if sketch)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), SKETCHES, st.booleans())))
def test_state_of_a_beginning_is_that_of_its_last_holders(steps):
    """Sketches grow in place, split and go; a new index of the same agents has the same states."""
    index, last = SketchIndex(), {}
    for node, agent, sketch, is_coming in steps:
        index.put("x", node, agent, sketch, is_coming=is_coming)
        last[node, agent] = sketch, is_coming
    anew = SketchIndex()
    for (node, agent), (sketch, is_coming) in last.items():
        anew.put("x", node, agent, sketch, is_coming=is_coming)
    for sketch, _ in last.values():
        assert index.matches("x", sketch) == anew.matches("x", sketch)
    assert index._pieces_count == anew._pieces_count


@given(STEPS)
def test_index_is_empty_after_all_removals(steps):
    index = SketchIndex()
    for tenant, node, agent, sketch in steps:
        if sketch is not None:
            index.put(tenant, node, agent, sketch)
    for tenant, node, agent, _ in steps:
        index.remove(tenant, node, agent)

    assert len(index) == 0
    assert not any(root.children or root.below for root in index._roots.values())


def test_known_tag_skips_update():
    index = SketchIndex()
    index.put("t", "a", "x", chain(1, 2), tag=(1, 1))
    index.put("t", "a", "x", chain(3), tag=(1, 1))
    assert index.matches("t", chain(1, 2)) == {"a": Match(2, "x")}
    index.put("t", "a", "x", chain(3), tag=(1, 2))
    assert index.matches("t", chain(1, 2)) == {}


def test_extending_and_diverging_matches_are_distinguished():
    index = SketchIndex()
    index.put("t", "a", "short", chain(1, 2))
    index.put("t", "b", "long", chain(1, 2, 3, 4))

    assert index.matches("t", chain(1, 2, 3, 9)) == {"a": Match(2, "short"), "b": Match(3)}


def test_different_opening_is_a_different_conversation():
    index, sketch = SketchIndex(), chain(1, 2)
    index.put("t", "a", "alice", sketch, opening=1)
    index.put("t", "b", "bob", sketch)

    assert index.matches("t", sketch, 1)["a"] == Match(2, "alice")
    assert index.matches("t", sketch, 2)["a"] == Match(2), "its memory can still be shared"
    assert index.matches("t", sketch, 2)["b"] == Match(2, "bob"), "its beginning is in no sketch"

    index.put("t", "a", "alice", chain(1, 2, 0), "listed")
    assert index.matches("t", chain(1, 2, 0), 2)["a"] == Match(3), "a list leaves it as it was"
    index.remove("t", "a", "alice")
    index.put("t", "a", "alice", sketch)
    assert index.matches("t", sketch, 2)["a"] == Match(2, "alice"), "a new one of that name"


def test_oldest_sketches_are_evicted_first(monkeypatch):
    monkeypatch.setattr("router.placement.sketch_index.SKETCH_AGENTS_MAX", 3)
    index = SketchIndex()
    for number in range(5):
        index.put("t", "a", f"agent-{number}", chain(number))
    index.put("t", "a", "agent-2", chain(2, 2))
    index.put("t", "a", "agent-5", chain(5))

    known = [number for number in range(6) if index.matches("t", chain(number))]
    assert known == [2, 4, 5]
    assert len(index) == 3


def test_long_sketches_evict_older_ones(monkeypatch):
    monkeypatch.setattr("router.placement.sketch_index.SKETCH_PIECES_KEPT_MAX", 10)
    index = SketchIndex()
    index.put("t", "a", "first", chain(*[1] * 6))
    index.put("t", "a", "alike", chain(*[1] * 7))
    assert len(index) == 2, "pieces that agents share are kept once"
    index.put("t", "a", "long", chain(*[2] * 12))
    assert index.matches("t", chain(*[2] * 12)) == {"a": Match(12, "long")}
    assert len(index) == 1
    index.remove("t", "a", "long")
    assert index._pieces_count == 0


def test_growing_sketch_evicts_the_others(monkeypatch):
    monkeypatch.setattr("router.placement.sketch_index.SKETCH_PIECES_KEPT_MAX", 10)
    index = SketchIndex()
    index.put("t", "a", "oldest", chain(*[1] * 6))
    index.put("t", "a", "latest", chain(2))
    index.put("t", "a", "oldest", chain(*[1] * 12))
    assert index.matches("t", chain(*[1] * 12)) == {"a": Match(12, "oldest")}
    assert len(index) == 1


def test_suffix_extends_only_a_known_sketch():
    index, whole = SketchIndex(), chain(1, 2, 3, 4, 5)
    index.put("t", "a", "x", chain(1, 2, 9))
    assert index.extend("t", "a", "x", (2, whole[1]), whole[2:], tag=1)
    assert index.matches("t", whole) == {"a": Match(5, "x")}
    assert index.extend("t", "a", "x", (2, whole[1]), (), tag=1), "known by its tag"
    assert not index.extend("t", "a", "x", (2, whole[2]), (7,)), "another beginning"
    assert not index.extend("t", "a", "x", (6, whole[4]), (7,)), "longer than what is known"
    assert not index.extend("t", "a", "y", (1, whole[0]), (7,))
    assert index.matches("t", whole) == {"a": Match(5, "x")}


def test_index_distinguishes_coming_from_stored_prompts():
    index, begun, whole = SketchIndex(), chain(1, 2), chain(1, 2, 3)

    def states(sketch=whole):
        return {node: match.state for node, match in index.matches("x", sketch).items()}

    coming = index.put_coming("x", "a", whole)
    borrowed = index.put_coming("x", "b", whole, borrows=True)
    assert states() == {"a": HeadState.COMING, "b": HeadState.BORROWED}
    index.put("x", "a", "mira", begun)  # splits the edge
    assert states() == {"a": HeadState.COMING, "b": HeadState.BORROWED}
    assert states(begun)["a"] is HeadState.STORED
    index.put("x", "b", "otto", whole)
    assert states()["b"] is HeadState.STORED
    for node, name in (("a", coming), ("b", borrowed)):
        index.remove("x", node, name)
    assert states() == {"a": HeadState.STORED, "b": HeadState.STORED}


def test_admitted_prompt_is_coming_until_it_is_computed():
    index = SketchIndex()
    sketch = chain(1, 2, 3)
    index.put("t", "a", "alice", sketch, is_coming=True)
    assert index.matches("t", sketch)["a"].state is HeadState.COMING
    index.settle("t", "a", "alice")
    index.settle("t", "a", "alice")
    assert index.matches("t", sketch)["a"].state is HeadState.STORED
    index.put("t", "a", "bob", sketch, is_coming=True)
    assert index.matches("t", sketch)["a"].state is HeadState.STORED, "alice's is"
    index.remove("t", "a", "alice")
    assert index.matches("t", sketch)["a"].state is HeadState.COMING
    index.remove("t", "a", "bob")
    assert index.matches("t", sketch) == {}
