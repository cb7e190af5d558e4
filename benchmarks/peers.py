"""The same conversations on macfabric and on other servers, in one run on one machine.

    cold            a prompt without any cached part
    hot             the next turn of the last conversation
    shared head     another conversation with the same system prompt
    alternating     next turns of both conversations, one after the other
    repeat          the same request again
    edited          a word in the middle of the first message changed
    thoughts        turns of a template that drops the thoughts of earlier answers
    restart         the next turn after the server was stopped and started again
    eight at once   eight new conversations of a quarter of the length: the slowest one

All requests are plain OpenAI requests: no server is told which conversation they continue.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.chat_client import ChatAnswer, ChatClient, Message
from benchmarks.large_model import END
from benchmarks.measured_cells import Figures, MeasuredCells, add_keep_argument
from benchmarks.peer_servers import (
    ENVIRONMENTS,
    OURS,
    PEERS,
    PeerUnavailableError,
    environment_of,
    require_readable,
    variables,
)
from benchmarks.process_usage import ProcessUsage
from benchmarks.prompts import add_model_argument, model_folder, text_of, user
from benchmarks.report import Limit, Report, environment, say
from benchmarks.servers import ServerError, free_port, running_server, short_folder

DESCRIPTION = "macfabric beside other servers: cold, hot, shared heads, edits, restarts, memory"

CONTEXT, QUICK_CONTEXT = 4_096, 512
ROUNDS, QUICK_ROUNDS = 3, 1
ANSWER_TOKENS = 8
AT_ONCE = 8
HEAD_SHARE = 0.75  # of a prompt, that two conversations have in common
THINKS = "think"  # beginning of system prompts whose answers have thoughts
QUICK_PEERS = (OURS, "mlx_lm.server")
HOT_RATIO_MAX = 0.9
RESTART_RATIO_MAX = 1.2
ALTERNATING_RATIO_MAX = 0.2
# As in templates of models that can answer without thinking: the empty thought is part of the
# prompt, but not of the history.
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}\n{{ message.content }}" + END + "\n"
    "{% endfor %}{% if add_generation_prompt %}assistant\n"
    "{% if messages[0].content.startswith('" + THINKS + "') %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    add_model_argument(parser)
    parser.add_argument("--peers", help="names, separated by semicolons; `all` (default: those "
                        "that need no other environment)")  # fmt: skip
    parser.add_argument("--install", action="store_true", help="make the environments they need")
    parser.add_argument(
        "--environments", type=Path, default=ENVIRONMENTS, help=f"default: {ENVIRONMENTS}"
    )
    parser.add_argument("--context", type=int, help=f"tokens of a prompt (default: {CONTEXT})")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    add_keep_argument(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Measure each peer that can run."""
    names = _chosen(arguments)
    context = arguments.context or (QUICK_CONTEXT if arguments.quick else CONTEXT)
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    with model_folder(arguments) as model, short_folder() as folder:
        parameters = {"model": model.name, "context tokens": context, "rounds": rounds}
        cells = MeasuredCells(arguments.keep, {**parameters, **environment()})
        served = _with_template(model, folder / model.name)
        reasons: dict[str, str] = {}
        with cells.until_interrupted():
            for name in names:
                if name in cells:
                    continue
                say(name)
                try:
                    require_readable(name, served)
                    environment_folder = environment_of(
                        name, arguments.environments, installs=arguments.install
                    )
                    trial = _Trial(
                        name, environment_folder, served, folder / f"home-{len(reasons)}-{name[:4]}"
                    )
                    cells.add(name, trial.measure(context, rounds))
                except (PeerUnavailableError, ServerError, RuntimeError, OSError) as error:
                    reasons[name] = " ".join(str(error).split())[-300:]
                    say(f"{name} does not run: {reasons[name]}")
    cells.finish()
    return _report(cells, parameters, names, reasons)


def _chosen(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.peers == "all":
        return tuple(PEERS)
    if arguments.peers is None:
        own = tuple(name for name, peer in PEERS.items() if not (peer.requirements or peer.reason))
        return QUICK_PEERS if arguments.quick else own
    names = tuple(name.strip() for name in arguments.peers.split(";"))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        message = f"no peer is called {unknown[0]!r}; there are: {'; '.join(PEERS)}"
        raise SystemExit(message)
    return names


def _with_template(model: Path, folder: Path) -> Path:
    """Return a copy of a model whose template has answers with thoughts."""
    folder.mkdir()
    for path in model.iterdir():
        if path.name not in ("tokenizer_config.json", "chat_template.jinja"):
            (folder / path.name).symlink_to(path)
    config = json.loads((model / "tokenizer_config.json").read_text("utf-8"))
    config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class _Trial:
    """Server under test, and its samples."""

    def __init__(self, name: str, environment: Path, model: Path, home: Path) -> None:
        self._name = name
        self._peer = PEERS[name]
        self._environment = environment
        self._model = model
        self._home = home
        self._figures: Figures = {}
        self._client = ChatClient("", "")

    def measure(self, context: int, rounds: int) -> Figures:
        """Return the samples of every situation."""
        last: list[Message] = []
        with self._running() as usage:
            self._ask(self._prompt("warm-up", 64))
            for number in range(rounds):
                last = self._conversations(f"{number}", context, usage)
                self._thoughts(f"{number}", context)
                self._at_once(f"{number}", context // 4)
            self._note("peak memory [MB]", usage.peak_bytes / 1e6)
        with self._running():
            self._note_answer("restart", self._ask(last))
        return self._figures

    @contextmanager
    def _running(self) -> Iterator[ProcessUsage]:
        """Run the server with the caches that it kept."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        self._client = ChatClient(url, self._peer.model(self._model))
        command = self._peer.command(self._environment, self._model, port)
        home, health = self._home, self._peer.health
        with running_server(command, url, health, home, env=variables(self._name, home)) as process:
            usage = ProcessUsage(process.pid)
            try:
                yield usage
            finally:
                usage.stop()

    def _conversations(self, seed: str, context: int, usage: ProcessUsage) -> list[Message]:
        first, second = (
            self._prompt(f"{seed}-{name}", context, f"head-{seed}") for name in ("a", "b")
        )
        self._note_answer("cold", self._turn(first))
        before = usage.written_bytes(self._home)
        self._note_answer("hot", self._turn(first))
        self._note("written in a hot turn [MB]", (usage.written_bytes(self._home) - before) / 1e6)
        self._note_answer("shared head", self._turn(second))
        for talk in (first, second, first, second):
            self._note_answer("alternating", self._turn(talk))
        self._note_answer("repeat", self._ask(first[:-2]))
        edited = [dict(message) for message in first]
        words = edited[1]["content"].split(" ")
        words[len(words) // 2] = "changed"
        edited[1]["content"] = " ".join(words)
        self._note_answer("edited", self._ask(edited))
        return first

    def _thoughts(self, seed: str, context: int) -> None:
        talk = self._prompt(f"thoughts-{seed}", context // 2, f"{THINKS}-{seed}")
        talk[0]["content"] = f"{THINKS} {talk[0]['content']}"
        self._turn(talk)
        for _ in range(2):
            self._note_answer("thoughts", self._turn(talk))

    def _at_once(self, seed: str, context: int) -> None:
        prompts = [self._prompt(f"{seed}-{n}", context, f"{seed}-{n}") for n in range(AT_ONCE)]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = list(threads.map(self._ask, prompts))
        self._note("eight at once", max(answer.ttft_s for answer in answers))

    def _prompt(self, seed: str, tokens: int, head: str = "") -> list[Message]:
        head_tokens = int(HEAD_SHARE * tokens)
        system = text_of(self._model, head_tokens, f"{head or seed} system")
        text = text_of(self._model, tokens - head_tokens, seed)
        return [{"role": "system", "content": system}, user(text)]

    def _turn(self, talk: list[Message]) -> ChatAnswer:
        """Ask, and add the answer and the next question to the conversation."""
        answer = self._ask(talk)
        talk += [answer.message(), user(f"What next, after {len(talk)}?")]
        return answer

    def _ask(self, messages: Sequence[Message]) -> ChatAnswer:
        return self._client.chat(messages, ANSWER_TOKENS, ignore_eos=False)

    def _note_answer(self, name: str, answer: ChatAnswer) -> None:
        self._note(name, answer.ttft_s)
        if answer.prompt_tokens:
            self._note(f"{name}: cached", answer.cached_tokens / answer.prompt_tokens)

    def _note(self, name: str, value: float) -> None:
        self._figures.setdefault(name, []).append(value)


def _report(
    cells: MeasuredCells,
    parameters: Mapping[str, Any],
    names: Sequence[str],
    reasons: Mapping[str, str],
) -> Report:
    seconds: dict[str, dict[str, float]] = {}
    cached: dict[str, dict[str, float]] = {}
    usage: dict[str, dict[str, float]] = {}
    for name in names:
        cell = cells.get(name)
        if cell is None:
            continue
        medians = {key: statistics.median(values) for key, values in cell.items()}
        seconds[name] = {key: medians[key] for key in medians if not _is_other(key)}
        marked = {key.partition(":")[0]: medians[key] for key in medians if ": cached" in key}
        cached[name] = marked
        usage[name] = {key: medians[key] for key in medians if "[MB]" in key}
    figures: dict[str, Any] = {
        "seconds to the first token": seconds,
        "cached share of the prompt": cached,
        "memory and disk": usage,
    }
    missing = {name: reasons.get(name, "not reached") for name in names if name not in seconds}
    if missing:
        figures["did not run"] = {name: {"reason": reason} for name, reason in missing.items()}
    ratios = {
        f"{name} by {OURS}: {key}": row[key] / seconds[OURS][key]
        for name, row in seconds.items()
        if name != OURS and OURS in seconds
        for key in ("cold", "hot", "alternating", "edited", "restart", "eight at once")
        if key in row
    }
    notes = ["medians; a cached share is what the server reports, or 0"]
    if cells.is_interrupted:
        notes.append("the run was interrupted: rows are missing")
    return Report(parameters, figures, ratios, _limits(seconds), tuple(notes))


def _is_other(key: str) -> bool:
    return ": cached" in key or "[MB]" in key


def _limits(seconds: Mapping[str, Mapping[str, float]]) -> tuple[Limit, ...]:
    ours, theirs = seconds.get(OURS), seconds.get("mlx_lm.server")
    if ours is None or theirs is None:
        return ()
    return (
        Limit("hot by mlx_lm.server's hot [x]", ours["hot"] / theirs["hot"], HOT_RATIO_MAX,
              is_least=False),
        Limit("alternating by cold [x]", ours["alternating"] / ours["cold"],
              ALTERNATING_RATIO_MAX, is_least=False),
        Limit("restart by hot [x]", ours["restart"] / ours["hot"], RESTART_RATIO_MAX,
              is_least=False),
    )  # fmt: skip
