"""A real day of three nodes, replayed by the simulator: its mean TTFT, and its order of policies.

Three nodes of one model and a real router run in this process, and each policy serves the same
seeded sessions. Each node's device is paced: a chunk and a step take at least as long as on a
device of the given speed, so that the nodes' speeds do not depend on each other or on this machine.
The simulator then gets the data that any operator has: the router's log of decisions, and the fleet
that the router learnt from its turns (`GET /v1/placement/decisions`, as trace and as fleet).
"""

import argparse
import random
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from benchmarks.chat_client import ChatClient, Message
from benchmarks.large_model import write_model
from benchmarks.local_fabric import LocalFabric, local_fabric
from benchmarks.paced_engine import Pace, slow_down
from benchmarks.report import Limit, Report, open_directly, say
from benchmarks.workload import Geometry
from fabric.keys import OPERATOR_HEADER
from fabric.settings import NodeSettings, RouterSettings
from node.mlx import backend
from router.placement.choice import Policy
from router.simulate.catalog import SHIPPED
from router.simulate.fleet_file import FleetModel, parse_fleet
from router.simulate.run import SimulatedRun
from router.simulate.traces import TraceRow, arrivals_of, read_trace

DESCRIPTION = "a log of three paced nodes, replayed by the simulator under each policy"

MODEL = Geometry(64, 128, 2, 2, 1, 32, 2_048)  # computes much faster than the paced devices
SIMULATED = {  # names of the shipped policies in the simulator
    Policy.SECONDS: SHIPPED,
    Policy.LEAST_LOAD: "router-least-load",
    Policy.ROUND_ROBIN: "router-round-robin",
}
SESSIONS, QUICK_SESSIONS = 14, 2
TURNS, QUICK_TURNS = (4, 8), 2
QUICK_SPEEDUP = 8.0  # of devices and clients
APART_S = 9.0  # mean time between the starts of sessions
PAUSE_S = (2.0, 12.0)  # of a client, after an answer as long as expected
EXPECTED_S = 4.0
GROUPS = 3  # share of sessions with one system prompt
SYSTEM_WORDS, OWN_WORDS, MORE_WORDS = 250, (40, 160), (20, 120)
ANSWER_TOKENS = (8, 40)
WARM_UP_WORDS = 300
ERROR_MAX = 0.15
NEAR = 1.1  # factor between means that the noise of a day explains
OPERATOR = "key-of-the-operator"
DECISIONS = "/v1/placement/decisions?format="
OWN, COMMON = "its own log, replayed [s]", "the log of seconds, replayed [s]"
REAL, RATIO = "real [s]", "replayed, over real"

PACES = {"fast": Pace(300.0, 30.0), "middle": Pace(200.0, 25.0), "slow": Pace(100.0, 15.0)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--seed", type=int, default=0, help="of the sessions (default: 0)")
    parser.add_argument("--sessions", type=int, help=f"default: {SESSIONS}")


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """Turn of a session: its new text, the answer's size, and its earliest time."""

    text: str
    answer_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """Conversation of one agent."""

    agent: str
    system: str
    turns: tuple[PlannedTurn, ...]


def plan(seed: int, sessions: int, turns_max: int = TURNS[1]) -> list[PlannedSession]:
    """Plan the sessions of a day; equal seeds give equal ones."""
    rng = random.Random(seed)
    systems = [_words(rng, SYSTEM_WORDS) for _ in range(GROUPS)]
    planned, began_s = [], 0.0
    for number in range(sessions):
        began_s += rng.expovariate(1 / APART_S)
        at_s, turns = began_s, []
        for turn in range(rng.randint(*TURNS)):
            words = rng.randint(*(MORE_WORDS if turn else OWN_WORDS))
            turns.append(PlannedTurn(_words(rng, words), rng.randint(*ANSWER_TOKENS), at_s))
            at_s += EXPECTED_S + rng.uniform(*PAUSE_S)
        kept = tuple(turns[:turns_max])
        planned.append(PlannedSession(f"agent-{number}", rng.choice(systems), kept))
    return planned


def _words(rng: random.Random, count: int) -> str:
    return " ".join(f"word{rng.randrange(1_000)}" for _ in range(count))


@dataclass(frozen=True, slots=True)
class Day:
    """Results of a policy's day: the log of its turns, and the fleet that its router learnt."""

    rows: tuple[TraceRow, ...]
    fleet: FleetModel

    @property
    def mean_s(self) -> float:
        """Mean time to first token."""
        return sum(row.ttft_s or 0.0 for row in self.rows) / len(self.rows)

    def replayed_s(self, policy: str) -> float:
        """Return the mean time to first token of the same turns in the simulator."""
        return SimulatedRun(self.fleet, policy, 1, arrivals_of(self.rows)).play().ttft_mean_s


def play(
    folder: Path,
    model: str,
    policy: Policy,
    planned: Sequence[PlannedSession],
    speedup: float = 1.0,
) -> Day:
    """Play the sessions on new nodes under a policy, with everything faster by `speedup`."""
    settings = NodeSettings(durability="none")
    router = RouterSettings(operator_keys={"bench": OPERATOR})
    with local_fabric(
        model, nodes=tuple(PACES), settings=settings, router=router, policy=policy
    ) as fabric:
        for name, of_node in PACES.items():
            engine, faster = fabric.node(name).node.resources.engine, of_node.times(speedup)
            slow_down(engine.engine, faster)
            engine.prefill_speed.start(round(faster.prefill_tokens_per_s), 1.0)
        _warm_up(fabric.client())
        _play_all(fabric.client(), planned, speedup)
        log = folder / f"{policy}.jsonl"
        log.write_bytes(_read(fabric, "trace"))
        fleet = parse_fleet(yaml.safe_load(_read(fabric, "fleet")))
    chunk_tokens = backend.current().chunk_tokens_max
    return Day(tuple(read_trace(log)), replace(fleet, chunk_tokens_max=chunk_tokens))


def _warm_up(client: ChatClient) -> None:
    """Make each node compute prompts, so that the router knows its speeds."""
    rng = random.Random("warm up")
    for number in range(2 * len(PACES)):
        messages: list[Message] = [{"role": "user", "content": _words(rng, WARM_UP_WORDS)}]
        client.chat(messages, ANSWER_TOKENS[1], agent=f"warm-{number}")


def _play_all(client: ChatClient, planned: Sequence[PlannedSession], speedup: float) -> None:
    """Play all sessions; each turn waits for its time and for the answer before it."""
    began_s = time.monotonic()

    def session(each: PlannedSession) -> None:
        messages: list[Message] = [{"role": "system", "content": each.system}]
        for turn in each.turns:
            time.sleep(max(0.0, began_s + turn.at_s / speedup - time.monotonic()))
            messages.append({"role": "user", "content": turn.text})
            answer = client.chat(messages, turn.answer_tokens, agent=each.agent)
            messages.append(answer.message())

    with ThreadPoolExecutor(len(planned)) as threads:
        list(threads.map(session, planned))


def _read(fabric: LocalFabric, form: str) -> bytes:
    """Return the router's decisions in a form for the simulator."""
    headers = {OPERATOR_HEADER: OPERATOR}
    request = urllib.request.Request(f"{fabric.url}{DECISIONS}{form}", headers=headers)  # noqa: S310
    with open_directly(request, 60.0) as answer:
        return answer.read()


def run(arguments: argparse.Namespace) -> Report:
    """Play the sessions under each policy, then replay them."""
    count = arguments.sessions or (QUICK_SESSIONS if arguments.quick else SESSIONS)
    turns_max = QUICK_TURNS if arguments.quick else TURNS[1]
    speedup = QUICK_SPEEDUP if arguments.quick else 1.0
    planned = plan(arguments.seed, count, turns_max)
    turns = sum(len(each.turns) for each in planned)
    days: dict[Policy, Day] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = str(write_model(folder / "model", MODEL))
        for policy in SIMULATED:
            say(f"{turns} turns under {policy}")
            days[policy] = play(folder, model, policy, planned, speedup)
    parameters = {**MODEL.as_parameters(), "sessions": count, "seed": arguments.seed}
    return _report(parameters, days)


def _swapped(table: Mapping[Policy, Mapping[str, float]]) -> int:
    """Count the pairs that a replay orders otherwise; close real means count as equal."""
    pairs = [(one, other) for one in table for other in table]
    apart = [(a, b) for a, b in pairs if table[a][REAL] * NEAR < table[b][REAL]]
    return sum(table[a][COMMON] >= table[b][COMMON] for a, b in apart)


def _report(parameters: Mapping[str, int], days: Mapping[Policy, Day]) -> Report:
    logged, table = days[Policy.SECONDS], dict[Policy, dict[str, float]]()
    for policy, day in days.items():
        own_s = day.replayed_s(SIMULATED[policy])
        common_s = logged.replayed_s(SIMULATED[policy])
        ratio, turns = own_s / day.mean_s, len(day.rows)
        times = {REAL: day.mean_s, OWN: own_s, RATIO: ratio, COMMON: common_s}
        table[policy] = {**times, "turns": turns}
    errors = {policy: abs(row[RATIO] - 1) for policy, row in table.items()}
    limits = (
        *(Limit(f"error of {p}", error, ERROR_MAX, is_least=False) for p, error in errors.items()),
        Limit("pairs of policies in another order", _swapped(table), 0, is_least=False),
    )
    paces = {
        name: {"prompt tokens/s": each.prefill_tokens_per_s, "steps/s": each.decode_steps_per_s}
        for name, each in PACES.items()
    }
    figures = {"paces": paces, "mean time to first token": table}
    return Report(parameters, figures, {p: row[RATIO] for p, row in table.items()}, limits)
