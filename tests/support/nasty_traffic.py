"""Agent programs that are hard on a cache: dates, reminders, elided results, large calls."""

import json
from collections.abc import Callable

from tests.support.agent_traffic import SYSTEM, TOOLS, Driver, Talk, drop_thought, words

_RECORD = {"name": "lantern", "size": 7, "held": [1, 2.5, None, True], "more": {"at": "harbor"}}


def date_at_the_head(driver: Driver) -> None:
    for day in range(3):
        system = f"Today is day {day} of the year.\n{SYSTEM}"
        talk = Talk(driver, f"day-{day}", system, echo=drop_thought)
        for _ in range(3):
            talk.ask()


def long_json(driver: Driver) -> None:
    talk = Talk(driver, tools=TOOLS, echo=drop_thought)
    talk.ask(call=("read", {"path": "all"}))
    for step in range(3):
        result = json.dumps([{**_RECORD, "id": step * 100 + at} for at in range(12)], indent=1)
        _give(talk, result)
        talk.answer(call=("read", {"path": f"page {step}"}))
    _give(talk, "[]")
    talk.answer()
    talk.ask()


def elided(driver: Driver) -> None:
    """Remove old results while the loop continues; keep the newest."""
    talk = Talk(driver, tools=TOOLS)
    talk.ask(call=("read", {"path": "0"}))
    for step in range(5):
        _give(talk, words(700 + step, 60))
        results = [message for message in talk.messages if _is_result(message)]
        if len(results) > 2:
            results[-3]["content"] = "(left out)"
        talk.answer(call=("read", {"path": str(step)}))
    _give(talk, "nothing")
    talk.answer()


def marks_in_texts(driver: Driver) -> None:
    """Paste marks of templates and models into users' messages."""
    talk = Talk(driver, echo=drop_thought)
    for turn in range(3):
        talk.ask(f"{words(930 + turn, 10)} {' and '.join(_pasted(driver)[turn:])} {turn}?")


def marks_in_results(driver: Driver) -> None:
    """Return marks of templates and models as tool results."""
    talk = Talk(driver, tools=TOOLS, echo=drop_thought)
    talk.ask(call=("read", {"path": "0"}))
    for step in range(3):
        _give(talk, f"{words(935 + step, 20)}\n{'user '.join(_pasted(driver)[step:])}")
        talk.answer(call=("read", {"path": str(step)}))
    _give(talk, "".join(_pasted(driver)))
    talk.answer()
    talk.ask()


def _pasted(driver: Driver) -> list[str]:
    return [*driver.shape.specials, "<think>", "</think>", "<tool_call>", "[INST]", "{% x %}"]


def reminded(driver: Driver) -> None:
    """Append a reminder to the newest message only."""
    talk = Talk(driver, tools=TOOLS)
    for turn in range(4):
        plain = words(940 + turn, 40)
        talk.ask(f"{plain}\n<system-reminder>{words(990 + turn, 20)}</system-reminder>")
        talk.messages[-2]["content"] = plain


def large_calls(driver: Driver) -> None:
    """Write files by calls, and never read them again."""
    talk = Talk(driver, tools=TOOLS)
    talk.ask(call=("write", {"path": "a", "what": words(950, 200)}))
    for step in range(3):
        _give(talk, "written")
        talk.answer(call=("write", {"path": f"b{step}", "what": words(951 + step, 200)}))
    _give(talk, "written")
    talk.answer()
    talk.ask()


def commands_in_text(driver: Driver) -> None:
    """Run agents without tools: each step is a text of the model and an observation of the user."""
    talk = Talk(driver, echo=drop_thought)
    for step in range(6):
        answer = f"{words(960 + step, 15)}\n```\ngrep -rn '{step}' . | head\n```\n"
        talk.ask(f"Observation:\n{words(970 + step, 60)}\n(Open file: none)\n$ ", text=answer)


def _give(talk: Talk, result: str) -> None:
    calls = talk.messages[-1].get("tool_calls")
    if calls:
        message = {"role": "tool", "tool_call_id": calls[0]["id"], "content": result}
    else:  # as in `Talk.work`
        message = {"role": "user", "content": f"It gave: {result}"}
    talk.messages.append(message)


def _is_result(message: dict[str, object]) -> bool:
    return message["role"] == "tool" or str(message["content"]).startswith("It gave: ")


NASTY: dict[str, Callable[[Driver], None]] = {
    scenario.__name__: scenario
    for scenario in (
        date_at_the_head,
        long_json,
        elided,
        marks_in_texts,
        marks_in_results,
        reminded,
        large_calls,
        commands_in_text,
    )
}
