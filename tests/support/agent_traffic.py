"""Conversations of agent programs with a node, and what each turn reused.

A client returns the answers it received. For each prompt: its tokens, those that came from a cache,
and those that an exact match with anything computed before could have saved.
"""

import asyncio
import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fabric.edit_mode import EditMode
from fabric.ids import OperationId, TenantId
from fabric.turn.alignment import common_prefix
from fabric.turn.generation import Admitted, Delta, GenerateRequest, Sampling, ToolCalls
from node.service import NodeService
from router.prompt import chat_prompt
from tests.support.conversations import read_messages
from tests.support.scripted_answers import Script
from tests.support.services import TENANT, identity_of
from tests.support.template_shapes import ScriptedAnswer, Shape

_operations = itertools.count()
_TEXT = (
    "the lantern in the cellar stands beside a copper falcon while nobody at the harbor reads "
    "what was written about the tower, and every keeper of the archive counts numbers again"
)
WORDS = _TEXT.split()
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use it to {name} something that the archive or the harbor holds.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "where it is"},
                    "what": {"type": "string", "description": "what is meant by it"},
                },
                "required": ["path"],
            },
        },
    }
    for name in ("read", "write", "search", "list")
]


def words(seed: int, count: int) -> str:
    """Return text whose first words already depend on the seed."""
    state, out = seed * 2_654_435_761 % 2**32, []
    for _ in range(count):
        state = (state * 1_664_525 + 1_013_904_223) % 2**32
        out.append(WORDS[(state >> 16) % len(WORDS)])
    return f"{seed}: " + " ".join(out) + "."


def corpus() -> list[str]:
    """Return the texts on which tokenizers are trained."""
    return [words(seed, 60) for seed in range(20)] + [json.dumps(TOOLS)]


SYSTEM = "You keep the archive. " + words(1, 420)


@dataclass(frozen=True)
class Reuse:
    """Token counts of one turn: its prompt, the reused ones, and those that could be reused."""

    prompt: int
    cached: int
    possible: int
    agent: str
    is_first: bool


@dataclass
class Driver:
    """Client that sends turns to one node and records their reuse."""

    service: NodeService
    shape: Shape
    script: Script
    has_ids: bool = False
    tenant: TenantId = TENANT
    options: dict[str, Any] = field(default_factory=dict)
    continues: bool = False  # the last message is the beginning of an answer
    edits: EditMode | None = None
    turns: list[Reuse] = field(default_factory=list)
    computed: list[list[int]] = field(default_factory=list)
    spelled: list[bytes] = field(default_factory=list)  # answers as the model generated them

    def ask(
        self,
        name: str,
        messages: list[dict[str, Any]],
        answer: ScriptedAnswer,
        tools: list[Any] | None,
    ) -> dict[str, Any]:
        """Run one turn; return the message that the client gets."""
        tokenizer = self.service.node.resources.tokenizer
        self.script.tokens.clear()
        end = (answer.call and self.shape.end_of_call) or self.shape.end
        (self.script.end,) = tokenizer.encode(end).ids
        self.script.tokens.extend(tokenizer.encode(self.shape.say(answer)).ids)
        self.spelled.append(self.shape.say(answer).encode())
        options = {**self.shape.options, **self.options}
        conversation = read_messages(messages)
        prompt = chat_prompt(conversation, tools, options, continues=self.continues)
        request = GenerateRequest(
            operation=OperationId(f"traffic-{next(_operations):06d}"),
            tenant=self.tenant,
            identity=identity_of(name if self.has_ids else None),
            sampling=Sampling(max_tokens=4_000),
            messages=prompt.messages,
            tools=prompt.tools,
            template_options=prompt.template_options,
            sketch=prompt.sketch,
            continues=prompt.continues,
            edits=self.edits,
        )

        async def drain() -> list[Any]:
            return [event async for event in self.service.node.turns.serve(request)]

        events = asyncio.run_coroutine_threadsafe(drain(), self.service._loop).result(120)
        self._count(events[0])
        return _message(events)

    def _count(self, admitted: Admitted) -> None:
        agent = self.service.node.resources.table.get((self.tenant, admitted.agent))
        assert agent is not None
        record = agent.manifest
        fed = list(record.token_ids)
        prompt = fed[: record.prompt_tokens_count]
        assert len(prompt) == admitted.prompt_tokens
        spelled = self.service.node.resources.tokenizer._tokenizer.decode(prompt)
        text = agent.manifest.text.encode()[: record.token_ends[len(prompt) - 1]]
        self._compare(prompt, list(record.token_ends[: len(prompt)]), text)
        if self.shape.eats_space_behind:  # which detokenizing does not restore
            spelled, text = "".join(spelled.split()), b"".join(text.split())
        assert spelled.encode() == text, (spelled[-200:], text[-200:])
        possible = max((common_prefix(prompt, earlier) for earlier in self.computed), default=0)
        possible = min(possible, len(prompt) - 1)
        self.turns.append(
            Reuse(
                len(prompt),
                admitted.cached_tokens,
                possible,
                admitted.agent,
                not self.computed,
            )
        )
        self.computed.append(fed)

    def _compare(self, fed: list[int], ends: list[int], text: bytes) -> None:
        """Check that a cold run computes the same tokens, except in answers, which keep theirs."""
        tokenizer = self.service.node.resources.tokenizer
        plain = tokenizer.control_marks.plain_in(text, fed, ends)
        fresh = tokenizer.encode(text.decode(), plain=plain)
        ours = {*zip([0, *ends], ends, fed, strict=False)}
        theirs = {*zip([0, *fresh.ends], fresh.ends, fresh.ids, strict=False)}
        kept = [
            found.span()
            for answer in self.spelled
            for found in re.finditer(re.escape(answer), text)
        ]
        for start, end, _ in ours ^ theirs:
            around = text[max(0, start - 40) : end + 40]
            assert any(first <= start and end <= last for first, last in kept), around

    @property
    def share(self) -> float:
        """Return the reused share of the tokens that an exact match could have reused."""
        possible = sum(turn.possible for turn in self.turns)
        return sum(turn.cached for turn in self.turns) / possible if possible else 1.0


def _message(events: list[Any]) -> dict[str, Any]:
    deltas = [event for event in events if isinstance(event, Delta)]
    text = "".join(event.text for event in deltas if not event.reasoning)
    thought = "".join(event.text for event in deltas if event.reasoning)
    calls = [call for event in events if isinstance(event, ToolCalls) for call in event.calls]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {
                "id": getattr(call, "id", None) or f"call_{at}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for at, call in enumerate(calls)
        ]
    return message


@dataclass
class Talk:
    """A conversation as its client keeps it."""

    driver: Driver
    name: str = "one"
    system: str = SYSTEM
    tools: list[Any] | None = None
    echo: Callable[[dict[str, Any]], dict[str, Any]] = lambda message: message
    messages: list[dict[str, Any]] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self.messages = self.messages or [{"role": "system", "content": self.system}]

    def ask(self, question: str | None = None, **answer_fields: Any) -> dict[str, Any]:
        self.step += 1
        question = question or words(100 + self.step, 40)
        self.messages.append({"role": "user", "content": question})
        return self.answer(**answer_fields)

    def answer(self, **answer_fields: Any) -> dict[str, Any]:
        """Request an answer to the messages so far, and append it."""
        answer = ScriptedAnswer(
            **{
                "text": "" if answer_fields.get("call") else words(200 + self.step, 30),
                "thought": words(300 + self.step, 40),
                **answer_fields,
            }
        )
        message = self.driver.ask(self.name, self.messages, answer, self.tools)
        self.messages.append(self.echo(message))
        return message

    def work(self, steps: int, result_words: int = 40) -> None:
        """Call a tool once per step, then answer."""
        for at in range(steps):
            self.step += 1
            call = ("read", {"path": words(400 + self.step, 4), "what": words(500 + self.step, 6)})
            if at == 0:
                self.ask(call=call)
            else:
                self.answer(call=call)
            calls = self.messages[-1].get("tool_calls")
            result = words(600 + self.step, result_words)
            if calls:
                more = {"role": "tool", "tool_call_id": calls[0]["id"], "content": result}
            else:  # the shape's calls are not parsed: such programs send the results as text
                more = {"role": "user", "content": result}
            self.messages.append(more)
        self.answer()


def drop_thought(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def trim(message: dict[str, Any]) -> dict[str, Any]:
    message = drop_thought(message)
    return {**message, "content": message["content"].strip() or None}


def fork(talk: Talk, name: str) -> Talk:
    return replace(talk, name=name, messages=list(talk.messages))


# --- scenarios -------------------------------------------------------------------------------


def chat(driver: Driver) -> None:
    talk = Talk(driver, echo=drop_thought)
    for _ in range(5):
        talk.ask()


def chat_kept(driver: Driver) -> None:
    talk = Talk(driver)
    for _ in range(4):
        talk.ask()


def chat_trimmed(driver: Driver) -> None:
    talk = Talk(driver, echo=trim)
    for _ in range(4):
        talk.ask()


def tools(driver: Driver) -> None:
    talk = Talk(driver, tools=TOOLS, echo=drop_thought)
    talk.work(4)
    talk.ask()


def tools_trimmed(driver: Driver) -> None:
    talk = Talk(driver, tools=TOOLS, echo=trim)
    talk.work(3)
    talk.ask()


def tools_kept(driver: Driver) -> None:
    talk = Talk(driver, tools=TOOLS)
    talk.work(4)
    talk.ask()


def long_loop(driver: Driver) -> None:
    talk = Talk(driver, tools=TOOLS)
    talk.work(14)
    talk.ask()


def date_at_the_end(driver: Driver) -> None:
    for day in range(3):
        system = f"{SYSTEM}\nToday is day {day} of the year."
        talk = Talk(driver, f"day-{day}", system, echo=drop_thought)
        talk.ask()
        talk.ask()


def edit_last(driver: Driver) -> None:
    talk = Talk(driver, echo=drop_thought)
    talk.ask()
    talk.ask()
    del talk.messages[-2:]
    talk.ask(words(900, 30))
    talk.ask()


def edit_early(driver: Driver) -> None:
    talk = Talk(driver, echo=drop_thought)
    for _ in range(3):
        talk.ask()
    del talk.messages[3:]
    talk.ask(words(901, 30))
    talk.ask()


def regenerate(driver: Driver) -> None:
    talk = Talk(driver, echo=drop_thought)
    talk.ask()
    talk.ask()
    del talk.messages[-1]
    talk.answer(text=words(902, 30))
    talk.ask()


def compact(driver: Driver) -> None:
    talk = Talk(driver, echo=drop_thought)
    for _ in range(3):
        talk.ask()
    talk.messages = [talk.messages[0]]
    talk.ask(f"What was said: {words(903, 60)}")
    talk.ask()


def sub_agents(driver: Driver) -> None:
    for number in range(3):
        talk = Talk(driver, f"sub-{number}", tools=TOOLS, echo=drop_thought)
        talk.ask(words(910 + number, 60))
        talk.ask()


def interleaved(driver: Driver) -> None:
    talks = [Talk(driver, f"talk-{at}", echo=drop_thought) for at in range(2)]
    for turn in range(3):
        for at, talk in enumerate(talks):
            talk.ask(words(920 + 10 * at + turn, 40))


def slide(driver: Driver) -> None:
    talk = Talk(driver, echo=drop_thought)
    for turn in range(5):
        talk.ask()
        if turn >= 2:
            del talk.messages[1:3]


def tongues(driver: Driver) -> None:
    talk = Talk(driver, echo=drop_thought)
    for turn in range(4):
        talk.ask(f"größer 東京 🦊 naïve {turn} é \n\n\n  ends  ", text=f"さくら 🌙 déjà {turn}\n")


SCENARIOS: dict[str, Callable[[Driver], None]] = {
    scenario.__name__: scenario
    for scenario in (
        chat,
        chat_kept,
        chat_trimmed,
        tools,
        tools_trimmed,
        tools_kept,
        long_loop,
        date_at_the_end,
        edit_last,
        edit_early,
        regenerate,
        compact,
        sub_agents,
        interleaved,
        slide,
        tongues,
    )
}
