"""What a phase's directives come to: the fabric's own, which name messages one by one."""

from typing import Any

from fabric.turn.messages import MessageRole
from router.scenario.conversation import memory_before
from router.scenario.scenario import MemoryEdit, Phase, Scenario
from router.scenario.utterance import Said

CLEARED = "[cleared]"


def directive_items(
    scenario: Scenario, said: Said, phase: Phase, edit: MemoryEdit
) -> list[dict[str, Any]]:
    """Return the `directives` of a POST to /v1/agents/ID/directives; empty for nothing to edit."""
    memory = memory_before(scenario, said, edit.agent, phase.id)
    if edit.clear_results_of is not None:
        return [
            {"tool_call_id": message.result_of, "replacement": CLEARED, "mode": edit.mode.value}
            for message in memory.messages
            if message.result_of is not None and message.name == edit.clear_results_of
        ]
    # A directive holds for all messages of its words, so one that stands elsewhere, too, stays.
    inside = {edit.forget}
    elsewhere = {
        (item.message.role, item.message.texts[0])
        for item in memory.remembered
        if item.phases != inside
    }
    return [
        {
            "message": {"role": role.value, "content": text},
            "replacement": None,
            "mode": edit.mode.value,
        }
        for role, text in dict.fromkeys(
            (item.message.role, item.message.texts[0])
            for item in memory.remembered
            if item.phases == inside
        )
        if (role, text) not in elsewhere and role is not MessageRole.SYSTEM
    ]
