"""The relay models satisfy the contract of edited caches in `benchmarks/contract.py`."""

import random

import pytest
from tokenizers import Tokenizer

from benchmarks import contract
from benchmarks.models import relay, relay_text, relay_train
from tests.support.samples import sample

STORIES_MAX = 40  # tried in order to find those whose two references differ
# Only the seeds are drawn: stories of one edit, of several, and of an unedited fact.
FEW, MANY = 2, 20


@pytest.mark.parametrize("name", sample(relay.trained(), "grouped"))
def test_amortize_keeps_and_forget_drops_knowledge_of_an_edited_fact(name, tmp_path):
    """Edits are the client's own or directives, on a real node."""
    service = contract.service_of(tmp_path, name)
    service.start()
    try:
        for story in _dropped(FEW):
            found = contract.play(service, story, f"{story.value}-{len(story.messages)}")
            assert contract.knows(story, found["full"])
            assert found["anew"].text == relay_text.UNKNOWN
            assert contract.holds(story, found), {arm: a.text for arm, a in found.items()}
            assert found["amortize"].amortized_tokens > 0
            assert contract.distance(found["anew"], found["exact"]) == 0.0
    finally:
        service.stop()


@pytest.mark.nightly
def test_directive_edits_only_its_own_of_equal_messages(tmp_path):
    story = contract.story(random.Random("0:0"))
    pairs = zip(story.messages, story.edited, strict=True)
    edited = [before for before, after in pairs if before != after]
    assert any(story.messages.count(message) > 1 for message in edited)
    service = contract.service_of(tmp_path, "grouped")
    service.start()
    try:
        found = contract.play(service, story, "equals")
    finally:
        service.stop()
    assert contract.distance(found["anew"], found["forget by directive"]) == 0.0


@pytest.mark.nightly
@pytest.mark.parametrize("name", relay.trained())
def test_most_edits_fulfil_the_contract(name):
    stories = [contract.story(random.Random(f"nightly:{n}")) for n in range(MANY)]
    played = contract.play_stories(name, stories, (0,))
    rates = contract.rates(stories, played)
    assert rates["references differ"] >= 0.9
    assert rates["contract holds"] >= contract.HOLDS_MIN
    assert contract.row(stories, played, "amortize")["kept_facts_right"] >= 0.9


def _dropped(count):
    """Draw stories whose fact is edited away, with one edit and with several.

    The largest numbers of edits leave so few tokens that saw the fact that some models lose it.
    """
    drawn = [contract.story(random.Random(f"sample:{n}")) for n in range(STORIES_MAX)]
    dropped = sorted((s for s in drawn if s.is_dropped), key=lambda s: s.edits)
    return [dropped[len(dropped) * part // count] for part in range(count)]


@pytest.mark.parametrize("name", relay.trained())
def test_stored_tokenizer_equals_the_generated_one(name):
    expected = relay_text.tokenizer()
    stored = Tokenizer.from_file(str(relay.FOLDER / name / "tokenizer.json"))
    assert stored.to_str() == expected.to_str()
    words = {*relay_text.FILLER, *relay_text.KINDS, *sum(relay_text.KINDS.values(), ())}
    assert all(len(expected.encode(f" {word}").ids) == 1 for word in words)


def test_training_hides_the_fact_from_its_question():
    """Training hides the message with the fact from the question's own tokens."""
    tokenizer, draw = relay_text.tokenizer(), random.Random(5)
    lesson = relay_train.Lesson(1.0, 4, (2, 4), 1, 3, hidden_share=1.0)
    hidden = 0
    for _ in range(20):
        example = relay_train.example(draw, tokenizer, lesson)
        for first, last, start, end in example.hidden:
            question = tokenizer.decode(example.ids[first:last])
            fact = tokenizer.decode(example.ids[start:end])
            kind = question.split(" the ")[1].split()[0]
            value = question.split()[-2]
            assert f"the {kind} is {value}" in fact
            assert end < first
            hidden += 1
    assert hidden > 10
