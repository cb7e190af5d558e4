"""Host names and web origins from which OpenAI's SDKs are accepted."""

import sys

import pytest

from tests.clients.installed import npm_folder
from tests.clients.programs import HERE, run_program
from tests.support.local_fabric import local_fabric

HOST, ORIGIN = "fabric.lan", "https://chat.example"


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    router = {"allowed_hosts": (HOST,), "cors_origins": (ORIGIN,)}
    with local_fabric(
        tmp_path_factory.mktemp("fabric"), "recall", "only", router=router
    ) as instance:
        yield instance


def test_allowed_host_is_accepted_and_others_refused(fabric, tmp_path):
    command = [sys.executable, str(HERE / "python" / "openai_doors.py")]
    report = run_program(command, fabric.url, fabric.model_name, tmp_path, ALLOWED_HOST=HOST)

    assert report["own"] == report["allowed"] == "stop"
    assert "rebound.example" in report["other"]


@pytest.mark.nightly
@pytest.mark.slow
def test_allowed_origin_gets_answers_and_errors(fabric, tmp_path):
    folder = npm_folder("openai-js")
    node = folder / "node_modules" / ".bin" / "node"
    command = [str(node), str(HERE / "javascript" / "openai_doors.mjs")]
    environment = {"CLIENT_FOLDER": str(folder), "ALLOWED_ORIGIN": ORIGIN}
    report = run_program(command, fabric.url, fabric.model_name, tmp_path, **environment)

    assert report["whole"] == report["streamed"] == "stop"
    assert "is not served here" in report["wrong"]
    assert "Connection error" in report["other"]
