"""`macfabric launch`: start an agent program with the arguments and environment for a fabric.

Arguments and environment that make each agent program use a fabric.

Source: the programs' own references of settings; tried with claude 2.1.197, codex 0.169,
opencode 1.18.33, qwen 0.24.4, aider 0.86.2.
"""

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from fabric.settings import is_loopback
from router.cli.data_folder import default_data_dir, make_private_folder
from router.cli.endpoint import KEY_VARIABLE, add_fabric_options, fabric_of
from router.cli.errors import MISUSED, CommandError, describe_os_error
from router.cli.terminal import print_error, print_json, print_line
from router.client.client import Fabric
from router.private_files import write_private

# Programs subtract the longest answer from the context: the rest is for the conversation.
_ANSWER_PART: Final = 4
_NAME_BYTES: Final = 8  # of the digest in a file's name
_QWEN_DEFAULTS: Final = "QWEN_CODE_SYSTEM_DEFAULTS_PATH"


@dataclass(frozen=True, slots=True)
class LaunchLimits:
    """Limits in tokens that a program plans its conversation by."""

    context_tokens: int
    answer_tokens: int

    @staticmethod
    def of(row: Mapping[str, Any]) -> "LaunchLimits | None":
        """Return the limits in a row of /v1/models; None if it has none."""
        context, answer = row.get("max_model_len"), row.get("max_output_tokens")
        if not isinstance(context, int) or not isinstance(answer, int):
            return None
        return LaunchLimits(context, max(1, min(answer, context // _ANSWER_PART)))


@dataclass(frozen=True, slots=True)
class LaunchTarget:
    """Endpoint and model that a program is pointed at."""

    url: str
    model: str
    key: str
    authority: str | None = None  # authority of the fabric's certificate
    limits: LaunchLimits | None = None
    folder: Path | None = None  # for files that a program reads its limits from

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def direct(self) -> dict[str, str]:
        """Return the variables that keep a program from asking a proxy for the fabric's host."""
        host = urlsplit(self.url).hostname or ""
        named = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
        listed = [name for name in named.replace(",", " ").split() if name]
        hosts = [host, "localhost"] if is_loopback(host) else [host]
        names = ",".join(dict.fromkeys([*listed, *hosts]))
        return {"NO_PROXY": names, "no_proxy": names}

    def file(self, program: str, content: Any) -> tuple[Path, str] | None:
        """Return the path and text of a file for a program; None without limits or a folder."""
        if self.limits is None or self.folder is None:
            return None
        text = json.dumps(content, indent=1)
        digest = blake2b(text.encode(), digest_size=_NAME_BYTES).hexdigest()
        return self.folder / f"{program}-{digest}.json", text


@dataclass(frozen=True, slots=True)
class ProgramStart:
    """Arguments and environment of a start; an empty variable must not be set."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    file: tuple[Path, str] | None = None  # written first: path and text


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """Agent program; `program` is None where the user names it."""

    title: str
    install: str
    configure: Callable[[LaunchTarget], ProgramStart]
    program: str | None


def _claude(served: LaunchTarget) -> ProgramStart:
    tiers = ("OPUS", "SONNET", "HAIKU")
    limits: dict[str, str] = {}
    if served.limits is not None:
        context = str(served.limits.context_tokens)
        limits = {
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": context,
            # Earlier versions compact by this one alone, which they raise to 100,000 at least.
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": context,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.limits.answer_tokens),
        }
    return ProgramStart(
        environment={
            **_anthropic(served),
            **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": served.model for tier in tiers},
            # A version and a hash at the head of each prompt would keep sessions from sharing it.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            **limits,
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
    limits: tuple[str, ...] = ()
    if served.limits is not None:
        limits = ("-c", f"model_context_window={served.limits.context_tokens}")
    return ProgramStart(
        ("-c", 'model_provider="macfabric"', "-c", provided, *limits, "-m", served.model),
        {KEY_VARIABLE: served.key, **authority},
    )


def _opencode(served: LaunchTarget) -> ProgramStart:
    name = f"macfabric/{served.model}"
    model: dict[str, Any] = {"name": served.model}
    if served.limits is not None:
        model["limit"] = {
            "context": served.limits.context_tokens,
            "output": served.limits.answer_tokens,
        }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "macfabric",
        "options": {"baseURL": served.v1, "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {served.model: model},
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
    name, limits = f"openai/{served.model}", served.limits
    metadata: dict[str, Any] = {"litellm_provider": "openai", "mode": "chat"}
    if limits is not None:
        metadata["max_tokens"] = metadata["max_output_tokens"] = limits.answer_tokens
        metadata["max_input_tokens"] = limits.context_tokens
    file = served.file("aider", {name: metadata})
    read = () if file is None else ("--model-metadata-file", str(file[0]))
    return ProgramStart(
        ("--model", name, "--no-show-model-warnings", *read),
        {
            "OPENAI_API_BASE": served.v1,
            "OPENAI_API_KEY": served.key,
            **_python_authority(served),
        },
        file,
    )


def _qwen(served: LaunchTarget) -> ProgramStart:
    limits: dict[str, str] = {}
    file = None
    if served.limits is not None:
        limits["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(served.limits.answer_tokens)
        window = {"contextWindowSize": served.limits.context_tokens}
        if _QWEN_DEFAULTS not in os.environ:  # an administrator's file goes first
            file = served.file("qwen", {"model": {"generationConfig": window}})
        if file is not None:
            limits[_QWEN_DEFAULTS] = str(file[0])
    return ProgramStart(
        ("--auth-type", "openai", "--model", served.model),
        {
            **_openai(served),
            **_node_authority(served),
            **limits,
        },
        file,
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
        description=f"Start an agent program so that it uses the fabric. CLIENT is one of: {names}."
        " Nothing is written to the program's own configuration; a file with the model's limits,"
        " which aider and qwen need, goes to DIR/launch.",
        epilog="Everything after -- goes to the program: macfabric launch claude -- -p 'hello'",
    )
    launch.add_argument(
        "client", metavar="CLIENT", choices=sorted(PROGRAMS), help="which program to start"
    )
    launch.add_argument("--model", metavar="MODEL", help="which model, if several are served")
    launch.add_argument(
        "--print",
        action="store_true",
        dest="prints",
        help="print what it needs, start nothing",
    )
    launch.set_defaults(run=run_launch)
    add_fabric_options(launch)


def run_launch(arguments: argparse.Namespace) -> int:
    """Replace this process by the program, or print its command; raise CommandError without it."""
    client = PROGRAMS[arguments.client]
    fabric = fabric_of(arguments)
    row = _chosen_model(fabric, arguments.model)
    model, limits = str(row["id"]), LaunchLimits.of(row)
    program, *further = _command_line(client, arguments.further)
    is_printed = arguments.prints or arguments.json
    key = fabric.key or _NO_KEY
    if fabric.key and is_printed:  # a terminal's scrollback would keep the key
        key = f"${KEY_VARIABLE}"
        if KEY_VARIABLE not in os.environ:
            print_error(f"note: put the key into {KEY_VARIABLE} first")
    folder = (arguments.data or default_data_dir()).expanduser().absolute() / "launch"
    served = LaunchTarget(fabric.url, model, key, _authority(fabric), limits, folder)
    launch = client.configure(served)
    if launch.file is not None and not _is_written(*launch.file):
        launch = client.configure(replace(served, folder=None))
    environment = {**launch.environment, **served.direct}
    command = [program, *launch.arguments, *further]
    if arguments.json:
        print_json({"command": command, "environment": environment, "model": model})
        return 0
    if is_printed:
        for line in _shell_lines(command, environment):
            print_line(line)
        return 0
    program_path = shutil.which(program)
    if program_path is None:
        how = f"Install it ({client.install}), or see" if client.install else "See"
        message = f"{program} is not installed here. {how} what it needs with --print."
        raise CommandError(message)
    os.execvpe(program_path, command, _environment(environment))  # noqa: S606 - as requested
    return 0  # reached only in tests


def _is_written(path: Path, text: str) -> bool:
    """Write a file for a program; note an error, as the program works without it, too."""
    try:
        make_private_folder(path.parent.parent)
        make_private_folder(path.parent)
        write_private(path, text)
    except (OSError, CommandError) as error:
        why = describe_os_error(error, path) if isinstance(error, OSError) else str(error)
        print_error(f"note: the program has to assume a context length ({why})")
        return False
    return True


def _chosen_model(fabric: Fabric, model: str | None) -> Mapping[str, Any]:
    """Return the row of the model to use: the wanted one, or the only one."""
    rows = {str(row.get("id")): row for row in fabric.rows("/v1/models")}
    served = sorted(rows)
    if not served:
        message = f"no node of {fabric.url} serves a model yet"
        raise CommandError(message)
    if model is None and len(served) > 1:
        message = f"choose a model with --model: {', '.join(served)}"
        raise CommandError(message, MISUSED)
    if model is not None and model not in served:
        message = f"no node serves {model!r}; name one of: {', '.join(served)}"
        raise CommandError(message, MISUSED)
    return rows[model or served[0]]


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


def _environment(chosen: Mapping[str, str]) -> dict[str, str]:
    unset = {name for name, value in chosen.items() if not value}
    merged = {**os.environ, **chosen}
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
