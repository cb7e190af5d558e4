"""Answers stay equal byte for byte when an agent's memory is evicted or moved between turns."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.local_fabric import Answer, LocalFabric, local_fabric
from tests.support.samples import sample
from tests.support.transcripts import ALL, Transcript, tool_use

RECALL = "recall"


def converse(
    fabric: LocalFabric, transcript: Transcript, disturb: Callable[[int, Answer], None]
) -> list[Answer]:
    """Play a transcript, disturbing the fabric between turns; check every answer."""
    agent = transcript.name.replace(" ", "-")
    messages = list(transcript.opening)
    answers: list[Answer] = []
    more = {"tools": transcript.tools} if transcript.tools else {}
    for number, turn in enumerate(transcript.turns):
        messages += turn.messages
        answer = fabric.chat(messages, agent, stream=bool(number % 2), **more)
        assert turn.expected in answer.text
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer.text})
        disturb(number, answer)
    return answers


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFabric]:
    """Run an undisturbed node."""
    with local_fabric(tmp_path_factory.mktemp("calm"), RECALL, "calm") as fabric:
        yield fabric


@pytest.mark.slow
@pytest.mark.parametrize("make", sample(ALL, tool_use), ids=lambda make: make.__name__)
def test_restart_eviction_and_migration_change_no_byte(
    make: Callable[[], Transcript], calm: LocalFabric, tmp_path: Path
) -> None:
    """Evict, move and restart in turn; answers, token counts and reuse equal a calm run's."""
    with local_fabric(tmp_path, RECALL, "left", "right") as fabric:
        after: list[str] = []

        def disturb(number: int, answer: Answer) -> None:
            other = "right" if answer.node == "left" else "left"
            kind = ("evict", "move", "restart")[number % 3]
            after.append(kind)
            if kind == "evict":
                fabric.drop_hot()
            elif kind == "move":
                fabric.migrate(answer.agent, other)
            else:
                fabric.restart(answer.node)

        disturbed = converse(fabric, make(), disturb)

    undisturbed = converse(calm, make(), lambda number, answer: None)
    assert [a.text for a in undisturbed] == [a.text for a in disturbed]
    assert [a.cached_tokens for a in undisturbed] == [a.cached_tokens for a in disturbed]
    tiers = {"evict": "disk", "move": "peer", "restart": "disk"}
    assert [tiers[kind] for kind in after[:-1]] == [a.cache for a in disturbed[1:]]
    assert {"hot"} == {a.cache for a in undisturbed[1:]}


@pytest.mark.nightly
def test_two_agents_without_ids_alternate_warm(tmp_path: Path) -> None:
    """A, B, A, B, A over one long system prompt: every return is warm, also after a restart."""
    system = {"role": "system", "content": "The rule of the house is kindness first. " * 60}
    talk = {
        name: [system, {"role": "user", "content": f"The {name} code is {name} lantern quartz."}]
        for name in ("alpha", "beta")
    }
    agents_by_name: dict[str, set[str]] = {"alpha": set(), "beta": set()}

    def turn(fabric: LocalFabric, name: str) -> Answer:
        answer = fabric.chat(talk[name])
        talk[name] += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": f"The {name} code is"},
        ]
        agents_by_name[name].add(answer.agent)
        return answer

    with local_fabric(tmp_path, RECALL, "left", "right") as fabric:
        turn(fabric, "alpha")
        turn(fabric, "beta")
        for name in ("alpha", "beta", "alpha"):
            answer = turn(fabric, name)
            assert (answer.cache, answer.match) == ("hot", "extend")
            assert answer.text == f" {name} lantern quartz."
        for node in ("left", "right"):
            fabric.restart(node)
        for name in ("beta", "alpha"):
            answer = turn(fabric, name)
            assert (answer.cache, answer.match) == ("disk", "extend")
            assert answer.text == f" {name} lantern quartz."
    assert [len(agents) for agents in agents_by_name.values()] == [1, 1]


def test_prompts_cut_anywhere_answer_like_cold_ones(tmp_path: Path) -> None:
    """Exact and diverging matches, and cuts inside a character or a merge, answer as a cold run."""
    head = {"role": "system", "content": "Notes: " + "größer 東京🦊 and then, " * 12}
    facts = "The vault code of Zoé is château-déjà-vu 東京 42.\n"
    prompts = [
        facts + "The vault code of Zoé is",
        facts + "The vault code of Zoé is",
        facts[:-12] + "\nThe vault code of Zoé is",
        facts[: facts.index("東") + 1] + "\nThe vault code of Zoé is",
        facts.replace("château", "chât") + "The vault code of Zoé is",
    ]
    with local_fabric(tmp_path, RECALL, "only") as fabric:
        warm = [fabric.chat([head, {"role": "user", "content": p}], "warm") for p in prompts]
        cold = [
            fabric.chat(
                [{**head, "content": f"{n} {head['content']}"}, {"role": "user", "content": p}],
                f"cold-{n}",
            )
            for n, p in enumerate(prompts)
        ]

    assert [a.text for a in cold] == [a.text for a in warm]
    assert [a.match for a in warm] == ["none", "exact", "diverge", "diverge", "diverge"]
    assert all(a.cached_tokens > a.prompt_tokens // 2 for a in warm[1:])
