"""Policies listed, loaded, named and run; a failing one leaves a turn unedited."""

import asyncio
import logging
import threading
from functools import partial

import pytest

from fabric.errors import RejectedError
from fabric.limits import MESSAGES_MAX
from fabric.settings import PolicySettings, RouterSettings, parse_settings
from fabric.turn.messages import MessageRole
from router.policies import foreign_calls
from router.policies.editing import Editing, RequestedPolicy
from router.policies.registry import configured_policies
from tests.router.policies import operators_own
from tests.router.policies.strategies import answer, call, result, system, user
from tests.router.rig import until

pytestmark = pytest.mark.anyio
OWN = "tests.router.policies.operators_own"
MESSAGES = [
    system("be brief"),
    user("the secret is otter"),
    answer("", call("a", n=1), thought="hm"),
    result("a", "z" * 500),
    user("second"),
]


def custom(kind, known_as="", **options):
    return PolicySettings(f"{OWN}:{kind}", options, known_as)


async def run(*settings, wanted=None, messages=MESSAGES):
    editing = Editing(settings)
    return await editing.edited("default", messages, 100, "echo", editing.select(wanted))


def outcomes(edited):
    return [str(outcome) for outcome in edited.outcomes]


async def test_policies_apply_in_order():
    edited = await run(
        custom("Shouting"),
        PolicySettings("strip_thinking"),
        custom("Shouting", "asking", mark="?"),
    )

    assert outcomes(edited) == ["Shouting=1", "strip_thinking=1", "asking=1"]
    assert edited.messages[1].texts == ("THE SECRET IS OTTER!?",)
    assert edited.messages[2].reasoning is None


async def test_operator_policy_gets_its_options_and_turn():
    assert (await run(custom("Shouting", only="other"))).messages == tuple(MESSAGES)
    assert (
        (await run(custom("Shouting", only="echo", mark="#"))).messages[1].texts[0].endswith("R#")
    )


async def test_equivalent_message_types_are_normalized():
    edited = await run(custom("Loose"))

    assert outcomes(edited) == ["Loose=0"]
    assert edited.messages == tuple(MESSAGES)
    assert type(edited.messages[1].role) is MessageRole


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (custom("Failing"), "raised KeyError"),
        (custom("Exiting"), "raised SystemExit"),
        (custom("Returning", what="nothing"), "did not return a list of messages"),
        (custom("Returning", what="no messages"), f"returned 0 messages, not 1 to {MESSAGES_MAX}"),
        (custom("Returning", what="texts"), "returned an item that is not a message"),
        (custom("Returning", what="a wrong type"), "returned an item that is not a message"),
        (custom("Returning", what="a subclass"), "returned an item that is not a message"),
        (custom("Returning", what="half a pair"), "returned an item that is not a message"),
        (custom("Returning", what="no system"), "changed the system prompt"),
        (custom("Returning", what="another question"), "changed the user's last message"),
        (custom("Returning", what="an orphan"), "separated a call from its result"),
        (custom("Returning", what="no result"), "separated a call from its result"),
        (custom("Returning", what="too much"), "returned too much"),
    ],
)
async def test_failing_policy_leaves_messages_unchanged_and_is_reported(settings, why, caplog):
    with caplog.at_level(logging.WARNING):
        edited = await run(settings, PolicySettings("strip_thinking"))

    assert outcomes(edited)[0] == f"{settings.known_as}=failed ({why})"
    assert edited.messages[:2] == tuple(MESSAGES[:2])
    assert edited.messages[2].uses[0].arguments == {"n": 1}, "parts of messages are unchanged, too"
    assert edited.messages[2].reasoning is None, "the next policy gets the unedited messages"
    assert caplog.messages == [f"policy {settings.known_as} left a turn unedited: it {why}"]
    assert "otter" not in caplog.text


async def test_hung_policy_is_skipped_until_its_call_ends(monkeypatch):
    monkeypatch.setattr(foreign_calls, "POLICY_S", 0.2)
    operators_own.RELEASED.clear()
    editing = Editing([custom("Slow")])
    edited = partial(editing.edited, "default", MESSAGES, 100, "echo", editing.select(None))
    other = asyncio.create_task(asyncio.sleep(0.01))
    first, second = await edited(), await edited()
    was_served = other.done()
    operators_own.RELEASED.set()
    await until(lambda: not editing.select(None)[0].calls._late)
    third = await edited()

    assert outcomes(first) == ["Slow=failed (took longer than 0.2 s)"]
    assert outcomes(second) == ["Slow=failed (is still busy with an earlier turn)"]
    assert was_served, "the event loop was not blocked"
    assert first.messages == second.messages == tuple(MESSAGES)
    assert outcomes(third) == ["Slow=0"]


async def test_concurrent_calls_of_one_policy_are_bounded(monkeypatch):
    monkeypatch.setattr(foreign_calls, "POLICY_S", 0.2)
    operators_own.RELEASED.clear()
    editing = Editing([custom("Slow")])
    calls = [
        editing.edited("default", MESSAGES, 100, "echo", editing.select(None)) for _ in range(9)
    ]
    results = await asyncio.gather(*calls)
    late = editing.select(None)[0].calls._late
    threads = [thread for thread in threading.enumerate() if thread.name == "policy"]
    assert all(thread.daemon for thread in threads), "no thread keeps the router from stopping"
    operators_own.RELEASED.set()

    assert {str(each.outcomes[0]) for each in results} == {"Slow=failed (took longer than 0.2 s)"}
    assert late == foreign_calls.POLICY_CALLS_MAX, "the other five calls started no thread"


async def test_request_chooses_among_configured_policies():
    editing = Editing(
        [
            PolicySettings("truncate_older_than", {"n": 5}, "mild"),
            PolicySettings("strip_thinking", by_default=False),
        ]
    )

    def names(*wanted):
        return [
            each.name for each in editing.select([RequestedPolicy(w, None, "p") for w in wanted])
        ]

    assert [each.name for each in editing.select(None)] == ["mild"]
    assert names() == []
    assert names("strip_thinking", "mild", "keep_all") == ["strip_thinking", "mild", "keep_all"]
    assert editing.select([RequestedPolicy("mild", None, "p")])[0].policy.n == 5
    chosen = editing.select([RequestedPolicy("truncate_older_than", {"n": 3}, "p")])[0]
    assert chosen.policy.n == 3
    for name, options in (("nobody", None), ("mild", {"n": 1}), ("truncate_older_than", {"m": 1})):
        with pytest.raises(RejectedError) as caught:
            editing.select([RequestedPolicy(name, options, "macfabric.policies[0]")])
        assert caught.value.param == "macfabric.policies[0]"
        assert caught.value.status == 400


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (PolicySettings("truncate"), "'truncate' is neither module:Class nor one of keep_all, "),
        (PolicySettings("no.such.module:X"), r"cannot import .*ModuleNotFoundError: No module"),
        (custom("Missing"), "cannot import .*AttributeError"),
        (custom("NoPolicy"), "is not a subclass of router.policies.policy.EditPolicy"),
        (custom("Unfinished"), "has no transform"),
        (custom("Shouting", loud=True), "refuses them: TypeError"),
        (PolicySettings("truncate_older_than", {"n": 0}), "n must be"),
    ],
)
def test_unloadable_policy_is_rejected_at_start(settings, why):
    with pytest.raises(RejectedError, match=why) as caught:
        list(configured_policies([PolicySettings("keep_all"), settings]))
    assert caught.value.message.startswith("macfabric.router.policies[1]")


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ([{"use": "keep_all"}, {"use": "keep_all"}], "another one has it"),
        ([{"use": "a.b:"}], "is neither a policy's name nor"),
        ([{"use": "../x:Y"}], "is neither a policy's name nor"),
        ([{"use": "keep_all", "name": "a b"}], "has letters"),
        ([{"use": "keep_all", "order": 1}], r"policies\[0\].order: is unknown"),
        ([{"use": "keep_all", "name": str(n)} for n in range(17)], "at most 16"),
        ([{}], "use: is missing"),
    ],
)
def test_invalid_policy_settings_are_rejected_with_reason(listed, why):
    with pytest.raises(RejectedError, match=why):
        parse_settings({"router": {"policies": listed}})


def test_policy_settings_keep_their_order():
    listed = [
        {"use": "strip_thinking"},
        {"use": "a.b:Mine", "options": {"x": 1}, "by_default": False},
    ]
    read = parse_settings({"router": {"policies": listed}}).router
    assert read == RouterSettings(
        policies=(
            PolicySettings("strip_thinking"),
            PolicySettings("a.b:Mine", {"x": 1}, by_default=False),
        )
    )
    assert [each.known_as for each in read.policies] == ["strip_thinking", "Mine"]
