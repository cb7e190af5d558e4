"""Player of scenarios with the recall model in this process; an agent's cache only grows."""

import json
import re
from dataclasses import replace

from benchmarks.models import recall
from benchmarks.models.recall_ask import Q4, Memory
from fabric.codec import from_plain
from fabric.edit_mode import EditMode
from fabric.record.directed_messages import edit_messages
from fabric.record.directive import Directive
from fabric.record.message_positions import message_digest
from fabric.turn.messages import Message, MessageRole, template_form
from router.scenario.conversation import prompt
from router.scenario.expectations import PromptFigures, judge_phase
from router.scenario.memory_edits import directive_items
from router.scenario.tool_answers import answer_call, offered_tools
from router.scenario.transcript import AnsweredCall, ToolStep, Utterance, ordered_transcript
from router.scenario.turn_order import TurnTable

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


class Player:
    """A run: `transcript` and `verdicts` grow with each turn."""

    def __init__(self, scenario, loaded):
        self.scenario = scenario
        self.loaded = loaded
        self.transcript, self.verdicts = [], []
        self._memories, self._figures, self._directives = {}, {}, {}

    def play(self):
        begun_phases, ended = set(), set()
        while due := TurnTable(self.scenario).next({u.turn for u in self.transcript}):
            for phase in {turn.phase: None for turn in due if turn.phase not in begun_phases}:
                self._begin(self.scenario.phase(phase))
                begun_phases.add(phase)
            for turn in due:
                self._speak(turn)
            turns = {u.turn for u in self.transcript}
            for phase in self.scenario.phases:
                if phase.id not in ended and TurnTable(self.scenario).has_ended(phase.id, turns):
                    ended.add(phase.id)
                    transcript = ordered_transcript(self.scenario, self.transcript)
                    self.verdicts += judge_phase(self.scenario, phase.id, transcript, self._figures)
        return self

    def _begin(self, phase):
        for copy in phase.fork.copies if phase.fork else ():
            memory = self._memories[copy] = Memory(recall.DEFAULT_OUT, Q4, self.loaded)
            memory.feed(self._memories[phase.fork.source].ids)
        transcript = ordered_transcript(self.scenario, self.transcript)
        for number, edit in enumerate(phase.directives):
            for item in directive_items(self.scenario, transcript, phase, edit):
                self._directives.setdefault(edit.agent, []).append(_directive(item, number))
                self._memories.pop(edit.agent, None)

    def _speak(self, turn):
        transcript = ordered_transcript(self.scenario, self.transcript)
        steps = ()
        while True:
            messages = prompt(self.scenario, transcript, turn, steps)
            text = self._answer(turn, messages)
            calls = CALL.findall(text)
            if not calls:
                break
            answered = [self._called(turn, json.loads(call), len(steps)) for call in calls]
            steps += (ToolStep(tuple(answered), text.partition("<tool_call>")[0]),)
        self.transcript.append(Utterance(turn.phase, turn.round, turn.speaker, text, steps))

    def _called(self, turn, call, number):
        name, arguments = call["name"], call["arguments"]
        result = answer_call(self.scenario, turn.speaker, name, arguments)
        return AnsweredCall(f"{turn.phase}-{turn.round}-{number}", name, arguments, result)

    def _answer(self, turn, messages):
        edits = self._directives.get(turn.speaker, ())
        shown = [template_form(m) for m in edit_messages(messages, edits).messages]
        memory = self._memories.get(turn.speaker)
        if memory is None:
            memory = self._memories[turn.speaker] = Memory(recall.DEFAULT_OUT, Q4, self.loaded)
        cached = len(memory.ids)
        tools = offered_tools(self.scenario, turn.speaker)
        answer = memory.chat(shown, **({"tools": tools} if tools else {}))
        figures = self._figures.get(turn, PromptFigures(0, 0))
        prompted = len(memory.ids) - len(answer.ids)
        self._figures[turn] = replace(
            figures,
            prompt_tokens=figures.prompt_tokens + prompted,
            cached_tokens=figures.cached_tokens + cached,
        )
        # The template writes the end mark of an answer.
        memory.trim(len(memory.ids) - 1)
        return memory.tokenizer.decode(answer.ids[:-1])


def _directive(item, number):
    digest = None
    if "message" in item:
        message = item["message"]
        digest = message_digest(
            Message(from_plain(MessageRole, message["role"]), (message["content"],))
        )
    mode = EditMode(item["mode"])
    return Directive(f"edit-{number}", mode, item["replacement"], item.get("tool_call_id"), digest)
