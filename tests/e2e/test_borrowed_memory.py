"""Borrowed rows are dropped when the lender is erased, private or forgets, also after a restart.

The model recalls a fact by rows computed after it (`benchmarks/models/relay.py`), so an agent
without the fact in its history answers with it if it has borrowed such rows.
"""

import random

import pytest

from benchmarks.models import relay_text
from benchmarks.models.relay import FOLDER
from tests.support.local_fabric import local_fabric

METAL, DOCUMENT_WORDS = "zinc", 60
WAYS = ("erased", "private", "forgetful")


def user(text):
    return {"role": "user", "content": text}


NOTED = {"role": "assistant", "content": relay_text.NOTED}
QUESTION = user(relay_text.question("metal"))


def documents(way):
    """Return messages of filler text, different for each way."""
    draw = random.Random(way)
    texts = [f"{relay_text.filler(draw, DOCUMENT_WORDS)} ." for _ in range(2)]
    return [message for text in texts for message in (user(text), NOTED)]


def history(first, way):
    """Return a question about the metal behind a first message and the documents."""
    return [user(first), NOTED, *documents(way), QUESTION]


def borrower_history(agent, way):
    """Return a borrower's messages, which do not mention the metal."""
    return history(f"{relay_text.CLEARED} {relay_text.filler(random.Random(agent), 5)} .", way)


def ask(fabric, agent, messages, edits="anywhere"):
    headers = {"X-Agent-ID": agent, "X-Macfabric-Edits": edits} if agent else {}
    answer = fabric.http.post(
        "/v1/chat/completions",
        headers=headers,
        json={"model": fabric.model_name, "messages": messages, "temperature": 0, "max_tokens": 2},
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"].strip(), answer.headers


def post(fabric, path, body=None):
    answer = fabric.http.post(f"/v1/agents/{path}", json=body)
    assert answer.status_code in {200, 201}, answer.text
    return answer


def lend(fabric, way):
    """Make an agent borrow rows with a fact; fork, move and export the borrower."""
    lender, borrower = f"lender-{way}", f"borrower-{way}"
    text, headers = ask(fabric, lender, history(f"the metal is {METAL} .", way))
    assert text.startswith(METAL)
    home = headers["x-macfabric-node"]
    messages = borrower_history(borrower, way)
    ask(fabric, borrower, messages[:2])
    fabric.migrate(borrower, home)
    text, headers = ask(fabric, borrower, messages)
    assert headers["x-macfabric-match"] == "spans"
    assert text.startswith(METAL), "the borrowed rows lack the fact"
    for copy in copies(way):
        post(fabric, f"{borrower}/fork", {"as": copy})
    fabric.migrate(f"moved-{way}", "left" if home == "right" else "right")
    return post(fabric, f"{borrower}/hibernate").content


def copies(way):
    """Return the names of a fork that stays on its node and of one that moves."""
    return f"fork-{way}", f"moved-{way}"


@pytest.fixture(scope="module")
def lent(tmp_path_factory):
    """Yield a fabric that was restarted after its agents borrowed, and the borrowers' files."""
    folder = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, str(FOLDER / "grouped"), "left", "right") as fabric:
        files = {way: lend(fabric, way) for way in WAYS}
        for name in fabric.services:
            fabric.restart(name)
        fabric.restart_router()
        fabric.await_agents()
        yield fabric, files


def take_back(fabric, way):
    """Erase the lender, make it private or edit it; return how many agents lost memory."""
    lender = f"lender-{way}"
    if way == "private":
        post(fabric, f"{lender}/share", {"scope": "agent"})
    elif way == "forgetful":
        post(fabric, f"{lender}/directives", {"directives": [{"message": 0, "mode": "exact"}]})
    else:
        answer = fabric.http.delete(f"/v1/agents/{lender}")
        assert answer.status_code == 200, answer.text
        receipts = answer.json()["receipts"]
        assert all(each["derived_tokens"] for each in receipts)
        return sum(each["derived_agents"] for each in receipts)
    return None


@pytest.mark.parametrize("way", WAYS)
def test_borrowers_forget_rows_of_erased_private_or_edited_lender(lent, way):
    fabric, files = lent
    borrower = f"borrower-{way}"
    messages, agents = borrower_history(borrower, way), (borrower, *copies(way))
    cold, _ = ask(fabric, None, messages)
    assert not cold.startswith(METAL)
    for agent in agents:
        assert fabric.http.get(f"/v1/agents/{agent}").json()["amortized"], "lost by the restart"

    # The receipts also count the copy that a move leaves on the old node.
    assert take_back(fabric, way) in {None, len(agents) + 1}

    check_unknown(fabric, agents, messages, cold)
    answer = fabric.http.post(f"/v1/agents/back-{way}/resume", content=files[way])
    assert answer.status_code in {200, 201}, answer.text
    check_unknown(fabric, [f"back-{way}"], messages, cold)


def check_unknown(fabric, agents, messages, cold):
    """Check that agents answer as a cold one when they borrow nothing new."""
    for agent in agents:
        text, headers = ask(fabric, agent, messages, "amortize")
        assert text == cold
        assert headers.get("x-macfabric-amortized-tokens", "0") == "0"
