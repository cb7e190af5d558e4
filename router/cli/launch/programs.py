"""Arguments and environment that make each agent program use a fabric.

Source: the programs' own references of settings; tried with claude 2.1.197, codex 0.169,
opencode 1.18.33, qwen 0.15.10.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.cli.endpoint import KEY_VARIABLE


@dataclass(frozen=True, slots=True)
class LaunchTarget:
    """Endpoint and model that a program is pointed at."""

    url: str
    model: str
    key: str
    authority: str | None = None  # authority of the fabric's certificate

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True, slots=True)
class ProgramStart:
    """Arguments and environment of a start; an empty variable must not be set."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """Agent program; `program` is None where the user names it."""

    title: str
    install: str
    configure: Callable[[LaunchTarget], ProgramStart]
    program: str | None


def _claude(served: LaunchTarget) -> ProgramStart:
    tiers = ("OPUS", "SONNET", "HAIKU")
    return ProgramStart(
        environment={
            **_anthropic(served),
            **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": served.model for tier in tiers},
            # A version and a hash at the head of each prompt would keep sessions from sharing it.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **_node_authority(served),
        }
    )


def _codex(served: LaunchTarget) -> ProgramStart:
    provider = {
        "name": "macfabric",
        "base_url": served.v1,
        "env_key": KEY_VARIABLE,
        "wire_api": "responses",
    }
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    provided = f"model_providers.macfabric={{{table}}}"
    authority = {"CODEX_CA_CERTIFICATE": served.authority} if served.authority else {}
    return ProgramStart(
        ("-c", 'model_provider="macfabric"', "-c", provided, "-m", served.model),
        {KEY_VARIABLE: served.key, **authority},
    )


def _opencode(served: LaunchTarget) -> ProgramStart:
    name = f"macfabric/{served.model}"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "macfabric",
        "options": {"baseURL": served.v1, "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {served.model: {"name": served.model}},
    }
    # The small model writes titles; another model than ours would have to be downloaded first.
    config = {"provider": {"macfabric": provider}, "model": name, "small_model": name}
    return ProgramStart(
        environment={
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            KEY_VARIABLE: served.key,
            **_node_authority(served),
        }
    )


def _aider(served: LaunchTarget) -> ProgramStart:
    return ProgramStart(
        ("--model", f"openai/{served.model}", "--no-show-model-warnings"),
        {
            "OPENAI_API_BASE": served.v1,
            "OPENAI_API_KEY": served.key,
            **_python_authority(served),
        },
    )


def _qwen(served: LaunchTarget) -> ProgramStart:
    return ProgramStart(
        ("--auth-type", "openai", "--model", served.model),
        {
            **_openai(served),
            **_node_authority(served),
        },
    )


def _any(served: LaunchTarget) -> ProgramStart:
    return ProgramStart(
        environment={
            **_openai(served),
            **_anthropic(served),
            **_node_authority(served),
            **_python_authority(served),
        }
    )


def _anthropic(served: LaunchTarget) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        "ANTHROPIC_API_KEY": "",  # it would replace the token
        "ANTHROPIC_MODEL": served.model,
    }


def _openai(served: LaunchTarget) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": served.v1,
        "OPENAI_API_KEY": served.key,
        "OPENAI_MODEL": served.model,
    }


def _node_authority(served: LaunchTarget) -> dict[str, str]:
    return {"NODE_EXTRA_CA_CERTS": served.authority} if served.authority else {}


def _python_authority(served: LaunchTarget) -> dict[str, str]:
    return {"SSL_CERT_FILE": served.authority} if served.authority else {}


PROGRAMS: Mapping[str, AgentProgram] = {
    "claude": AgentProgram(
        "Claude Code", "npm install -g @anthropic-ai/claude-code", _claude, "claude"
    ),
    "codex": AgentProgram("Codex CLI", "npm install -g @openai/codex", _codex, "codex"),
    "opencode": AgentProgram("opencode", "npm install -g opencode-ai", _opencode, "opencode"),
    "aider": AgentProgram("aider", "python -m pip install aider-chat", _aider, "aider"),
    "qwen": AgentProgram("Qwen Code", "npm install -g @qwen-code/qwen-code", _qwen, "qwen"),
    "any": AgentProgram("any program that uses OpenAI's or Anthropic's SDK", "", _any, None),
}
