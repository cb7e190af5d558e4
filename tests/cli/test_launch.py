"""Programs and settings of `launch`, and its errors."""

import json
import os
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from router.cli.launch import PROGRAMS, LaunchTarget
from tests.cli.fake_fabric import ANSWERS

ROOT = Path(__file__).parents[3]
PROGRAM = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
KEY = "a-tenants-own-key"


@pytest.fixture
def folder(tmp_path):
    """Return a folder of programs that print their arguments and environment."""
    for client in PROGRAMS.values():
        path = tmp_path / (client.program or "anything")
        path.write_text(f"#!{sys.executable}\n{PROGRAM}\n")
        path.chmod(0o755)
    return tmp_path


def launched(folder, fabric, *argv, **environment):
    """Run the command in a child process; return the program's arguments and environment."""
    command = [sys.executable, "-m", "router.cli.main", "launch", *argv[:1], "--url", fabric.url]
    done = subprocess.run(
        [*command, *argv[1:]],
        cwd=ROOT, env={**os.environ, "PATH": str(folder), "MACFABRIC_DATA": str(folder / "data"),
                       **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_each_program_gets_address_model_and_key(folder, fabric, name):
    fabric.key = KEY
    program = ["anything"] if name == "any" else []
    arguments, environment = launched(
        folder, fabric, name, "--", *program, "--its-own", MACFABRIC_API_KEY=KEY
    )

    configuration = json.dumps([arguments, environment])
    assert fabric.url in configuration
    assert "recall" in configuration
    assert KEY in environment.values()
    assert arguments[-1] == "--its-own"
    assert KEY not in arguments, "other accounts can read command lines"


def test_conflicting_variable_is_removed(folder, fabric):
    _, environment = launched(folder, fabric, "claude", ANTHROPIC_API_KEY="of another service")

    assert environment["ANTHROPIC_BASE_URL"] == fabric.url
    assert environment["ANTHROPIC_AUTH_TOKEN"]
    assert "ANTHROPIC_API_KEY" not in environment


def test_printed_shell_lines_equal_a_direct_start(folder, fabric, run, monkeypatch):
    fabric.key = KEY
    monkeypatch.setenv("MACFABRIC_API_KEY", KEY)
    status, out, err = run("launch", "claude", "--print", "--url", fabric.url, "--key", KEY)
    assert (status, err) == (0, "")
    assert KEY not in out, "terminals keep their output"

    shell = subprocess.run(
        ["/bin/sh", "-c", out], env={"PATH": str(folder), "MACFABRIC_API_KEY": KEY},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    arguments, environment = json.loads(shell.stdout)
    started = launched(folder, fabric, "claude", MACFABRIC_API_KEY=KEY)
    assert arguments == started[0]
    names = [name for name in started[1] if name.startswith(("ANTHROPIC", "CLAUDE"))]
    assert {name: environment.get(name) for name in names} == {n: started[1][n] for n in names}


def test_launch_prints_command_and_environment_as_json(fabric, run):
    status, out, _ = run("launch", "codex", "--json", "--url", fabric.url)

    printed = json.loads(out)
    assert status == 0
    assert printed["command"][0] == "codex"
    assert printed["model"] == "recall"
    assert f"{fabric.url}/v1" in shlex.join(printed["command"])


def test_ca_file_is_passed_to_programs(tmp_path):
    for name, client in PROGRAMS.items():
        configured = client.configure(launch_target(str(tmp_path / "ca.pem")))
        assert str(tmp_path / "ca.pem") in configured.environment.values(), name
        assert None not in client.configure(launch_target(None)).environment.values()


def launch_target(authority):
    return LaunchTarget("https://fabric:8472", "recall", "key", authority)


@pytest.mark.parametrize(
    ("argv", "status", "reason"),
    [
        (["claude"], 1, "claude is not installed here. Install it (npm install"),
        (["any"], 2, "name the program"),
        (["any", "--", "no-such-program"], 1, "no-such-program is not installed here. See"),
        (["codex", "--model", "gpt-5"], 2, "no node serves 'gpt-5'; name one of: recall"),
        (["emacs"], 2, "invalid choice"),
    ],
)
def test_failed_launch_states_its_reason(fabric, run, monkeypatch, tmp_path, argv, status, reason):
    monkeypatch.setenv("PATH", str(tmp_path))
    found, _, err = run("launch", *argv[:1], "--url", fabric.url, *argv[1:])

    assert found == status
    assert reason in err


def test_model_must_be_named_when_several_are_served(fabric, run, monkeypatch):
    rows = [{"id": "recall"}, {"id": "recall-window"}]
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/models"), {"object": "list", "data": rows})

    status, _, err = run("launch", "claude", "--print", "--url", fabric.url)
    assert (status, "choose a model with --model: recall, recall-window" in err) == (2, True)
    status, out, _ = run(
        "launch", "claude", "--print", "--url", fabric.url, "--model", "recall-window"
    )
    assert (status, "export ANTHROPIC_MODEL=recall-window" in out) == (0, True)


LIMITED = {"id": "recall", "max_model_len": 32_768, "max_output_tokens": 5_000}


@pytest.fixture
def fabric_with_limits(fabric, monkeypatch):
    """Return a fabric that lists its model's limits."""
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/models"), {"object": "list", "data": [LIMITED]})
    return fabric


def test_each_program_gets_context_and_completion_limits(folder, fabric_with_limits):
    _, claude = launched(folder, fabric_with_limits, "claude")
    codex, _ = launched(folder, fabric_with_limits, "codex")
    _, opencode = launched(folder, fabric_with_limits, "opencode")
    aider, _ = launched(folder, fabric_with_limits, "aider")
    _, qwen = launched(folder, fabric_with_limits, "qwen")

    assert claude["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"
    assert claude["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "32768"
    assert claude["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == "5000"
    assert codex[codex.index("model_context_window=32768") - 1] == "-c"
    config = json.loads(opencode["OPENCODE_CONFIG_CONTENT"])
    model = config["provider"]["macfabric"]["models"]["recall"]
    assert model["limit"] == {"context": 32_768, "output": 5_000}
    metadata = json.loads(Path(aider[aider.index("--model-metadata-file") + 1]).read_text())
    assert metadata["openai/recall"] == {
        "litellm_provider": "openai", "mode": "chat",
        "max_tokens": 5_000, "max_input_tokens": 32_768, "max_output_tokens": 5_000,
    }  # fmt: skip
    defaults = json.loads(Path(qwen["QWEN_CODE_SYSTEM_DEFAULTS_PATH"]).read_text())
    assert defaults == {"model": {"generationConfig": {"contextWindowSize": 32_768}}}
    assert qwen["QWEN_CODE_MAX_OUTPUT_TOKENS"] == "5000"


def test_completion_limit_is_capped_to_a_quarter_of_context(
    folder, fabric_with_limits, monkeypatch
):
    monkeypatch.setitem(LIMITED, "max_output_tokens", 32_768)
    _, claude = launched(folder, fabric_with_limits, "claude")

    assert claude["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] == str(32_768 // 4)


def test_administrators_qwen_defaults_are_kept(folder, fabric_with_limits):
    _, qwen = launched(
        folder, fabric_with_limits, "qwen", QWEN_CODE_SYSTEM_DEFAULTS_PATH="/of/admins"
    )

    assert qwen["QWEN_CODE_SYSTEM_DEFAULTS_PATH"] == "/of/admins"
    assert qwen["QWEN_CODE_MAX_OUTPUT_TOKENS"] == "5000"


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"any"}))
def test_programs_get_no_limits_from_a_fabric_without_them(fabric, run, name):
    _, out, _ = run("launch", name, "--json", "--url", fabric.url)

    for word in ("MAX_OUTPUT", "context_window", "limit", "metadata", "SYSTEM_DEFAULTS"):
        assert word not in out


def test_unwritable_metadata_file_does_not_prevent_launch(
    fabric_with_limits, run, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MACFABRIC_DATA", str(tmp_path / "file"))
    status, out, err = run("launch", "aider", "--json", "--url", fabric_with_limits.url)

    assert status == 0
    assert "has to assume a context length" in err
    assert "--model-metadata-file" not in json.loads(out)["command"]


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_fabric_address_bypasses_proxies(folder, fabric, name):
    program = ["anything"] if name == "any" else []
    proxies = {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "intra.example, 127.0.0.1"}
    _, environment = launched(folder, fabric, name, "--", *program, **proxies)

    assert environment["HTTP_PROXY"] == "http://127.0.0.1:9", "other hosts may need it"
    for variable in ("NO_PROXY", "no_proxy"):
        assert environment[variable] == "intra.example,127.0.0.1,localhost"
    assert urllib.request.proxy_bypass_environment("127.0.0.1", {"no": environment["no_proxy"]})


def test_remote_fabric_bypasses_proxies():
    assert launch_target(None).direct["NO_PROXY"].split(",")[-1] == "fabric"
