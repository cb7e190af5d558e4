"""An answer that moves to another node in its middle is remembered there as a whole."""

from fabric.control.node_calls import CommitMigration, Committed, Offer, SealAgent
from fabric.record.answers import decode_answers
from fabric.turn.generation import Finished, HandedOver
from tests.node.engine.test_live_handover import Stream, agent_at, copied_stream, move_call, move_of
from tests.support.agent_traffic import TOOLS, corpus, words
from tests.support.conversations import read_messages
from tests.support.scripted_answers import scripted
from tests.support.services import call, running
from tests.support.template_shapes import SHAPES, ScriptedAnswer, write_shape

THOUGHT, ARGUMENTS = words(5, 120), {"path": "x", "what": words(6, 120)}


def test_migrated_answer_keeps_its_whole_thought_and_call(tmp_path):
    shape = SHAPES["thought_opened"]
    model = str(write_shape(tmp_path / "model", shape, "full", corpus()))
    with (
        scripted() as script,
        running(tmp_path, model, "node-a") as a,
        running(tmp_path, model, "node-b") as b,
    ):
        answer = shape.say(ScriptedAnswer(thought=THOUGHT, call=("read", ARGUMENTS)))
        tokens = a.node.resources.tokenizer.encode(answer).ids
        (script.end,) = a.node.resources.tokenizer.encode(shape.end).ids
        script.tokens.extend(tokens)
        prompt_options = {
            "messages": read_messages([{"role": "user", "content": words(1, 600)}]),
            "tools": TOOLS,
        }

        stream = copied_stream(a, b, "mira", 20, prompt_options=prompt_options)
        sealed = call(a, move_call(SealAgent, b, "mira"), Offer)
        call(b, CommitMigration(move_of("mira"), a.node.name, sealed, 2), Committed)
        handed = stream.end()[-1]
        assert isinstance(handed, HandedOver)
        assert 20 <= len(handed.resume.answer_ids) < len(tokens)

        assert isinstance(
            Stream(b, "mira", handed.resume, epoch=2, prompt_options=prompt_options).end()[-1],
            Finished,
        )
        (answered,) = decode_answers(agent_at(b, "mira").manifest.provenance.answers).values()
    assert answered.reasoning == THOUGHT
    assert [call.arguments for call in answered.calls] == [
        '{"path": "x", "what": "' + ARGUMENTS["what"] + '"}'
    ]
