"""`macfabric launch`: start an agent program with the arguments and environment for a fabric.

Arguments and environment that make each agent program use a fabric.

Source: the programs' own references of settings; tried with claude 2.1.197, codex 0.169,
opencode 1.18.33, qwen 0.15.10.
"""

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.cli.endpoint import KEY_VARIABLE, add_fabric_options, fabric_of
from router.cli.errors import MISUSED, CommandError
from router.cli.terminal import print_error, print_json, print_line
from router.client.client import Fabric


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


_NO_KEY = "macfabric"  # programs refuse to start without one; a fabric without keys takes any


def add_launch(commands: Any) -> None:
    """Declare the command."""
    names = ", ".join(f"{name} ({client.title})" for name, client in PROGRAMS.items())
    launch = commands.add_parser(
        "launch",
        help="start an agent program on the fabric: claude, codex, opencode, aider, qwen or any",
        description=f"Start an agent program so that it uses the fabric. CLIENT is one of: {names}."
        " Nothing is written to the program's own configuration.",
        epilog="Everything after -- goes to the program: macfabric launch claude -- -p 'hello'",
    )
    launch.add_argument(
        "client", metavar="CLIENT", choices=sorted(PROGRAMS), help="which program to start"
    )
    launch.add_argument("--model", metavar="NAME", help="which model, if several are served")
    launch.add_argument(
        "--print",
        action="store_true",
        dest="prints",
        help="print what it needs, start nothing",
    )
    launch.set_defaults(run=run_launch)
    add_fabric_options(launch)


def split_off(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split a command line at `--` into our arguments and the program's.

    argparse would mix up the options of both.
    """
    if argv[:1] != ["launch"] or "--" not in argv:
        return argv, ()
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


def run_launch(arguments: argparse.Namespace) -> int:
    """Replace this process by the program, or print its command; raise CommandError without it."""
    client = PROGRAMS[arguments.client]
    fabric = fabric_of(arguments)
    model = _chosen_model(fabric, arguments.model)
    program, *further = _command_line(client, arguments.further)
    is_printed = arguments.prints or arguments.json
    key = fabric.key or _NO_KEY
    if fabric.key and is_printed:  # a terminal's scrollback would keep the key
        key = f"${KEY_VARIABLE}"
        if KEY_VARIABLE not in os.environ:
            print_error(f"note: put the key into {KEY_VARIABLE} first")
    launch = client.configure(LaunchTarget(fabric.url, model, key, _authority(fabric)))
    command = [program, *launch.arguments, *further]
    if arguments.json:
        print_json({"command": command, "environment": dict(launch.environment), "model": model})
        return 0
    if is_printed:
        for line in _shell_lines(command, launch.environment):
            print_line(line)
        return 0
    program_path = shutil.which(program)
    if program_path is None:
        how = f"Install it ({client.install}), or see" if client.install else "See"
        message = f"{program} is not installed here. {how} what it needs with --print."
        raise CommandError(message)
    os.execvpe(program_path, command, _environment(launch))  # noqa: S606 - it is what was asked for
    return 0  # reached only in tests


def _chosen_model(fabric: Fabric, wanted: str | None) -> str:
    """Return the model to use: the wanted one, or the only one."""
    served = sorted(str(row.get("id")) for row in fabric.rows("/v1/models"))
    if not served:
        message = f"no node of {fabric.url} serves a model yet"
        raise CommandError(message)
    if wanted is None and len(served) > 1:
        message = f"choose a model with --model: {', '.join(served)}"
        raise CommandError(message, MISUSED)
    if wanted is not None and wanted not in served:
        message = f"no node serves {wanted!r}; there is: {', '.join(served)}"
        raise CommandError(message, MISUSED)
    return wanted or served[0]


def _command_line(client: AgentProgram, arguments: Sequence[str]) -> list[str]:
    if client.program is not None:
        return [client.program, *arguments]
    if not arguments:
        message = "name the program: macfabric launch any -- python agent.py"
        raise CommandError(message, MISUSED)
    return list(arguments)


def _authority(fabric: Fabric) -> str | None:
    """Return the certificate that the program must trust in addition to the system's."""
    if not fabric.url.startswith("https:"):
        return None
    return next((str(path) for path in fabric.trusted), None)


def _environment(launch: ProgramStart) -> dict[str, str]:
    unset = {name for name, value in launch.environment.items() if not value}
    merged = {**os.environ, **launch.environment}
    return {name: value for name, value in merged.items() if name not in unset}


def _shell_lines(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    own_key = f"${KEY_VARIABLE}"
    lines = []
    for name, value in environment.items():
        if value == own_key:
            if name != KEY_VARIABLE:
                lines.append(f'export {name}="{own_key}"')
        elif value:
            lines.append(f"export {name}={shlex.quote(value)}")
        else:
            lines.append(f"unset {name}")
    return [*lines, shlex.join(command)]
