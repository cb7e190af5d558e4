"""Token ids must exist in the model, and prompts must fit the context."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from fabric.errors import RejectedError
from fabric.ids import AgentId
from fabric.limits import MIB
from tests.support.services import TENANT, ask, running
from tests.support.tiny_models import LLAMA, VOCABULARY, write_model, write_tokenizer

WORDS = "the cat sat on the mat and the dog sat on the log. "
CONTEXT_TOKENS = 600


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node")
    model = str(write_model(folder / "llama", LLAMA))
    with running(folder, model, context_tokens_max=CONTEXT_TOKENS) as node_service:
        yield node_service


def refusal_of(service, prompt, **sampling):
    with pytest.raises(RejectedError) as caught:
        ask(service, prompt, **sampling)
    return caught.value


@pytest.mark.parametrize(
    "token",
    [
        str(VOCABULARY),
        str(VOCABULARY + 1),
        "600",
        "100000",
        str(2**31 - 1),
        str(2**31),
        str(2**32 - 1),
        str(2**32),
        "9999999999",
        "-1",
        "1.5",
        "x",
        "",
        "²",
        "٣",
    ],
)
def test_bias_for_an_invalid_token_is_refused(service, token):
    error = refusal_of(service, WORDS, logit_bias={"1": 1.0, token: 100.0})

    assert (error.status, error.code) == (400, "invalid_request_error")
    assert error.param == "logit_bias"
    assert not service.node.live_turns


def test_last_token_of_the_model_can_be_biased(service):
    """A bias for this token alone makes it the answer."""
    last = VOCABULARY - 1
    reply = ask(service, WORDS, max_tokens=2, ignore_eos=True, logit_bias={str(last): 100.0})

    assert reply.text == 2 * f" row{last}"


def test_padding_rows_of_the_vocabulary_are_never_sampled(tmp_path):
    """Models pad their vocabularies; the text of such an id would be arbitrary or an error."""
    model = write_model(tmp_path / "llama", LLAMA)
    write_tokenizer(model)
    known = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    with running(tmp_path, str(model)) as service:
        bias = {str(token): -100.0 for token in range(known)}
        reply = ask(service, WORDS, max_tokens=8, ignore_eos=True, logit_bias=bias)
        assert service.node.resources.identity.model.vocabulary_size == known < VOCABULARY
        assert refusal_of(service, WORDS, logit_bias={str(known): 1.0}).param == "logit_bias"

    assert "!" not in reply.text  # mlx-lm's text for a token without one


def test_prompt_token_missing_in_the_model_is_refused(tmp_path):
    """A tokenizer may have more tokens than the model has rows."""
    write_tokenizer(tmp_path)
    known = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    count = known.get_vocab_size() - 20
    model = str(write_model(tmp_path / "small", {**LLAMA, "vocab_size": count}))
    with running(tmp_path, model) as service:
        texts = [known.decode([token]) for token in range(count, count + 20)]
        lacking = [text for text in texts if max(known.encode(text).ids, default=0) >= count]
        assert lacking
        error = refusal_of(service, lacking[0], max_tokens=2)
        assert (error.status, error.code) == (400, "invalid_request_error")
        assert error.param == "messages"
        assert ask(service, "the", max_tokens=2).finished


def messages(text):
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("make", [messages, str], ids=["messages", "raw"])
@pytest.mark.parametrize("piece", [WORDS, "x", " ", "größer 東京 ", "<|im_end|>", "\n\n"])
def test_overlong_prompt_is_refused_after_encoding_a_part(service, make, piece, monkeypatch):
    text = piece * (4 * MIB // len(piece.encode()))
    encoded_chars = count_encoded(service, monkeypatch)
    agents_count = len(service.node.resources.table)
    error = refusal_of(service, make(text))

    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert error.param == "messages"
    assert sum(encoded_chars) <= 128 * 1024
    assert len(service.node.resources.table) == agents_count


def test_prompt_over_the_byte_bound_is_refused_without_encoding(service, monkeypatch):
    encoded_chars = count_encoded(service, monkeypatch)
    error = refusal_of(
        service, "x" * (CONTEXT_TOKENS * service.node.resources.tokenizer.reach_bytes)
    )

    assert error.code == "context_length_exceeded"
    assert "bytes" in error.message
    assert encoded_chars == []


def test_longest_fitting_prompt_is_served_and_one_more_token_is_not(service):
    token = service.node.resources.tokenizer.encode("x").ids
    assert len(token) == 1
    fits = ask(service, "x" * (CONTEXT_TOKENS - 1), max_tokens=9, ignore_eos=True)

    assert fits.admitted.prompt_tokens == CONTEXT_TOKENS - 1
    assert fits.finished.completion_tokens == 1
    assert refusal_of(service, "x" * CONTEXT_TOKENS).code == "context_length_exceeded"


def test_chat_without_a_template_is_encoded_as_plain_text(tmp_path):
    """The text follows the token that the tokenizer puts in front of each prompt."""
    folder = write_model(tmp_path / "llama", LLAMA)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = "<|endoftext|>"
    tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.token_to_id(first))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with running(tmp_path, str(folder)) as service:
        reply = ask(service, messages("the cat"), agent="a", max_tokens=1)
        agent = service.node.resources.table.get((TENANT, AgentId("a")))
        ids = agent.manifest.token_ids[: reply.admitted.prompt_tokens]

    assert list(ids) == tokenizer.encode("the cat").ids
    assert ids[0] == tokenizer.token_to_id(first)


def count_encoded(service, monkeypatch):
    """Note how many characters each call to the tokenizer is given."""
    inner, counts = service.node.resources.tokenizer._tokenizer, []

    class Counting:
        def __call__(self, text, **options):
            counts.append(len(text))
            return inner(text, **options)

        def __getattr__(self, name):
            return getattr(inner, name)

    monkeypatch.setattr(service.node.resources.tokenizer, "_tokenizer", Counting())
    return counts
