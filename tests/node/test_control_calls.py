from fabric.control.calls import CALLS
from node.control_calls import ControlCalls
from tests.support.services import running
from tests.support.tiny_models import LLAMA, write_model


def test_a_node_answers_every_call_and_nothing_else(tmp_path):
    with running(tmp_path / "a", write_model(tmp_path / "model", LLAMA)) as service:
        answered = ControlCalls(service.node).answered

    assert answered == {spec.message for spec in CALLS.values()}
