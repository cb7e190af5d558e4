"""The contract of edited memory, checked with small trained models on a real node.

A message states a fact and others follow; then the message, and up to seven more, are replaced by
other text, and the agent is asked for the fact.

    full      nothing is edited: the answer is the fact
    anew      the edited prompt, computed from its start by a new agent
    amortize  the cache behind the edits is kept: the answer is still the fact
    forget    the cache behind the edits is recomputed: as anew

The models (`benchmarks/models/relay.py`) were trained to recall what later tokens saw of a fact, so
that both references differ. The figures are the rates at which an edited memory answers as each of
them, and the distances of its first token's distribution from theirs.
"""

import argparse
import asyncio
import itertools
import math
import random
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import relay_text, relay_train
from benchmarks.models.relay import FOLDER, trained
from benchmarks.report import Limit, Report, say
from fabric.control.calls import decode_reply, encode_call
from fabric.control.directive_calls import DirectAgent
from fabric.control.node_calls import AgentView
from fabric.edit_mode import EditMode
from fabric.ids import AgentId, NodeName, OperationId, TenantId
from fabric.record.directive import Directive
from fabric.record.message_positions import message_digest
from fabric.settings import NodeSettings
from fabric.turn.generation import (
    Admitted,
    Delta,
    GenerateRequest,
    Identity,
    IdentityKind,
    Sampling,
)
from fabric.turn.messages import Message, MessageRole
from node.service import NodeConfig, NodeService

DESCRIPTION = "what edited caches of trained models know: answers like the full or the new prompt's"

TRIALS, QUICK_TRIALS = 40, 1
RECOMPUTED, QUICK_RECOMPUTED = (0, 4, 16), (0,)
EDITS_MAX = 8
FACTS, OTHERS = (3, 8), (2, 4)
REPLACED_WORDS_MAX = 30
KEPT_SHARE = 0.25  # share of questions about an unedited fact
ALTERNATIVES = 20
HOLDS_MIN = 0.8
NOTE = "three layers, trained for this; a large model's later tokens carry less of most facts"
_TENANT = TenantId("default")
_operations = itertools.count()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--trials", type=int, default=TRIALS, help="of each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the stories (default: %(default)s)")
    parser.add_argument("--models", nargs="*", default=trained(), help="(default: %(default)s)")


@dataclass(frozen=True, slots=True)
class Story:
    """A history, its edited form, and a question whose fact only one message may state."""

    messages: tuple[Message, ...]
    edited: tuple[Message, ...]  # equally many messages, some of them changed
    first_question: str
    question: str
    value: str
    is_dropped: bool

    @property
    def edits(self) -> int:
        """Number of edited messages."""
        return sum(a != b for a, b in zip(self.messages, self.edited, strict=True))


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer, and the probability of each word as its first one."""

    text: str
    first: Mapping[str, float]  # log probabilities
    amortized_tokens: int


def run(arguments: argparse.Namespace) -> Report:
    """Play the stories with each model, and count the answers that equal each reference."""
    count = QUICK_TRIALS if arguments.quick else arguments.trials
    recomputed = QUICK_RECOMPUTED if arguments.quick else RECOMPUTED
    models = arguments.models[:1] if arguments.quick else arguments.models
    tables: dict[str, dict[str, dict[str, float]]] = {}
    ratios: dict[str, float] = {}
    limits: list[Limit] = []
    for model in models:
        stories = [story(random.Random(f"{arguments.seed}:{n}")) for n in range(count)]
        answers = play_stories(model, stories, recomputed)
        tables[model] = {arm: row(stories, answers, arm) for arm in answers[0]}
        ratios |= {f"{model}.{name}": rate for name, rate in rates(stories, answers).items()}
        kept = ratios.get(f"{model}.contract holds", math.nan)
        limits.append(Limit(f"contract holds, {model}", kept, HOLDS_MIN, is_least=True))
    parameters = {"models": models, "stories": count, "edits_max": EDITS_MAX}
    return Report(parameters, tables, ratios, tuple(limits), (NOTE,))


def play_stories(
    model: str, stories: Sequence[Story], recomputed: Sequence[int]
) -> list[dict[str, Answer]]:
    """Play all stories with one model, once for each number of recomputed tokens."""
    found: list[dict[str, Answer]] = [{} for _ in stories]
    for tokens in recomputed:
        say(f"{model}, {tokens} tokens computed anew behind each edit")
        with tempfile.TemporaryDirectory() as folder:
            service = service_of(Path(folder), model, tokens)
            service.start()
            try:
                for number, each in enumerate(stories):
                    if tokens:
                        arm = f"amortize, {tokens} anew"
                        found[number][arm] = amortized(service, each, f"{number}")
                    else:
                        found[number] |= play(service, each, f"{number}")
                        say(_progress(model, stories, found, number + 1))
            finally:
                service.stop()
    return found


def _progress(
    model: str, stories: Sequence[Story], answers: Sequence[Mapping[str, Answer]], count: int
) -> str:
    """Describe the stories played so far, for runs that are interrupted."""
    known = rates(stories[:count], answers[:count])
    figures = ", ".join(f"{name} {figure:.2f}" for name, figure in known.items())
    return f"{model}, {count} of {len(stories)} stories: {figures}"


def service_of(folder: Path, model: str, recomputed_tokens: int = 0) -> NodeService:
    """Return a node with one of the models."""
    name, key = NodeName("contract"), bytes(range(32))
    path = str(FOLDER / model) if (FOLDER / model).exists() else model
    settings = NodeSettings(durability="none", edit_recomputed_tokens=recomputed_tokens)
    return NodeService(NodeConfig(name, folder / "data", path, key, settings, "127.0.0.1", 1))


# --- the stories -----------------------------------------------------------------------------


def story(draw: random.Random) -> Story:
    """Draw a history and its edits, with longer or shorter text."""
    facts = draw.randint(*FACTS)
    made = relay_text.conversation(draw, facts, draw.randint(*OTHERS), relay_train.WORDS_MAX)
    first, asked = draw.sample(sorted(made.facts), 2)
    is_dropped = draw.random() >= KEPT_SHARE
    messages, edited = [], []
    users = [at for at, utterance in enumerate(made.utterances) if utterance.role == "user"]
    chosen = [at for at in users if made.utterances[at].fact_kind not in {first, asked}]
    chosen = draw.sample(chosen, min(len(chosen), draw.randint(0, EDITS_MAX - 1)))
    if is_dropped or not chosen:
        chosen.append(next(at for at in users if made.utterances[at].fact_kind == asked))
        is_dropped = True
    for at, utterance in enumerate(made.utterances):
        role = MessageRole(utterance.role)
        messages.append(Message(role, (utterance.text,)))
        words = draw.randint(0, REPLACED_WORDS_MAX)
        other = f"{relay_text.filler(draw, words)} ." if words > 1 else relay_text.CLEARED
        edited.append(Message(role, (other,)) if at in chosen else messages[-1])
    return Story(
        tuple(messages),
        tuple(edited),
        relay_text.question(first),
        relay_text.question(asked),
        made.facts[asked],
        is_dropped,
    )


# --- the turns -------------------------------------------------------------------------------


def play(service: NodeService, each: Story, name: str) -> dict[str, Answer]:
    """Ask in every way, each by its own agent."""
    answers = {
        "full": _edited(service, each, f"full-{name}", each.messages, None),
        "anew": _edited(service, each, None, each.edited, None),
        "amortize": amortized(service, each, name),
        "exact": _edited(service, each, f"exact-{name}", each.edited, EditMode.FORGET),
    }
    for mode in EditMode:
        arm = f"{mode.value} by directive"
        answers[arm] = _directed(service, each, f"{mode.value}-{name}", mode)
    return answers


def amortized(service: NodeService, each: Story, name: str) -> Answer:
    """Ask an agent that keeps the cache behind the edits."""
    return _edited(service, each, f"kept-{name}", each.edited, EditMode.AMORTIZE)


def _edited(
    service: NodeService,
    each: Story,
    agent: str | None,
    second: Sequence[Message],
    mode: EditMode | None,
) -> Answer:
    """Ask the first question of the full history, and the second of the edited one."""
    answer = _ask(service, agent or "nobody", (*each.messages, _user(each.first_question)), None)
    return _ask(service, agent, _grown(second, each, answer), mode)


def _directed(service: NodeService, each: Story, agent: str, mode: EditMode) -> Answer:
    answer = _ask(service, agent, (*each.messages, _user(each.first_question)), None)
    operation = OperationId(f"directive-{next(_operations)}")
    added = tuple(
        # Only this message, not equal ones, which the other arms leave unchanged.
        Directive(
            operation,
            mode,
            after.texts[0],
            None,
            message_digest(before),
            1.0,
            nth=each.messages[:at].count(before),
        )
        for at, (before, after) in enumerate(zip(each.messages, each.edited, strict=True))
        if before != after
    )
    call = encode_call(DirectAgent(_TENANT, AgentId(agent), added))
    reply = decode_reply(AgentView, service.control(call).result(60))
    assert isinstance(reply, AgentView), "the directives must be accepted"
    return _ask(service, agent, _grown(each.messages, each, answer), None)


def _grown(messages: Sequence[Message], each: Story, answer: Answer) -> tuple[Message, ...]:
    answered = Message(MessageRole.ASSISTANT, (answer.text,))
    return (*messages, _user(each.first_question), answered, _user(each.question))


def _user(text: str) -> Message:
    return Message(MessageRole.USER, (text,))


def _ask(
    service: NodeService, agent: str | None, prompt: tuple[Message, ...], mode: EditMode | None
) -> Answer:
    identity = Identity(IdentityKind.CONTENT)
    # An unnamed agent has a tenant of its own, so nothing is cached.
    tenant = _TENANT if agent else TenantId(f"tenant-{next(_operations)}")
    if agent is not None:
        identity = Identity(IdentityKind.AGENT, AgentId(agent))
    request = GenerateRequest(
        OperationId(f"contract-{next(_operations)}"),
        tenant,
        identity,
        Sampling(max_tokens=4, logprobs=ALTERNATIVES),
        messages=prompt,
        edits=mode,
    )

    async def read_answer() -> Answer:
        text, amortized_tokens = "", 0
        first: dict[str, float] = {}
        async for event in service.node.turns.serve(request):
            if isinstance(event, Admitted):
                amortized_tokens = event.amortized_tokens
            elif isinstance(event, Delta):
                text += event.text
                if not first and event.logprobs:
                    first = dict(event.logprobs[0].alternatives)
        return Answer(text.strip(), first, amortized_tokens)

    return asyncio.run_coroutine_threadsafe(read_answer(), service._loop).result(60)  # noqa: SLF001


# --- answers by reference ---------------------------------------------------------------------


def knows(each: Story, answer: Answer) -> bool:
    """Return whether an answer is the fact."""
    return answer.text.split()[:1] == [each.value]


def holds(each: Story, answers: Mapping[str, Answer]) -> bool:
    """Return whether all modes keep the contract for one dropped fact."""
    kept = all(knows(each, answers[arm]) for arm in ("amortize", "amortize by directive"))
    forgotten = (answers["exact"], answers["forget by directive"])
    return kept and all(answer.text == answers["anew"].text for answer in forgotten)


def rates(stories: Sequence[Story], played: Sequence[Mapping[str, Answer]]) -> dict[str, float]:
    """Return how often the references are as required, and how often the contract then holds."""
    dropped = [(s, a) for s, a in zip(stories, played, strict=True) if s.is_dropped]
    apart = [(s, a) for s, a in dropped if knows(s, a["full"]) and not knows(s, a["anew"])]
    return _without_missing(
        {
            "dropped facts": float(len(dropped)),
            "references differ": len(apart) / len(dropped) if dropped else math.nan,
            "contract holds": _share(holds(s, a) for s, a in apart),
            "edits": statistics.mean(s.edits for s in stories),
        }
    )


def row(
    stories: Sequence[Story], played: Sequence[Mapping[str, Answer]], arm: str
) -> dict[str, float]:
    """Compare one arm with both references, where these differ."""
    pairs = list(zip(stories, played, strict=True))
    apart = [
        (s, a) for s, a in pairs if s.is_dropped and knows(s, a["full"]) and not knows(s, a["anew"])
    ]
    figures = {
        "as_full": _share(a[arm].text == a["full"].text for _, a in apart),
        "as_anew": _share(a[arm].text == a["anew"].text for _, a in apart),
        "from_full_nats": _mean(distance(a["full"], a[arm]) for _, a in apart),
        "from_anew_nats": _mean(distance(a["anew"], a[arm]) for _, a in apart),
        "kept_facts_right": _share(knows(s, a[arm]) for s, a in pairs if not s.is_dropped),
        "amortized_tokens": _mean(float(a[arm].amortized_tokens) for _, a in pairs),
    }
    return _without_missing(figures)


def distance(reference: Answer, other: Answer) -> float:
    """Return the divergence of first tokens [nats], over the reference's likeliest."""
    least = min(other.first.values())
    return sum(
        math.exp(log) * (log - other.first.get(token, least))
        for token, log in reference.first.items()
    )


def _without_missing(figures: Mapping[str, float]) -> dict[str, float]:
    """Leave out figures without a story."""
    return {name: number for name, number in figures.items() if not math.isnan(number)}


def _share(found: Iterable[bool]) -> float:
    return _mean(float(each) for each in found)


def _mean(found: Iterable[float]) -> float:
    numbers = list(found)
    return statistics.mean(numbers) if numbers else math.nan
