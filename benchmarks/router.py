"""Cost of the router itself: CPU time of decisions and of periodic work, and bytes of heartbeats.

    decision   the snapshot of a turn and its placement, for named, continued and new agents
    regret     extra seconds of the chosen node over the best of all nodes
    periodic   the longest step of each background task, and its CPU time per second
    streams    CPU time of a streamed token, and time added to the first one

The router's own services over nodes in memory (`benchmarks/router_fleet.py`); no model runs.
"""

import argparse
import asyncio
import gc
import logging
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.report import Limit, Report, say
from benchmarks.router_fleet import (
    PIECE_BYTES,
    BenchFleet,
    MemoryNode,
    StepTimes,
    start_fleet,
    turn_of,
)
from benchmarks.router_streams import measure_streams
from fabric.control.calls import encode_call
from fabric.control.change_calls import COLUMNS, DescribeChanges, ListChanges
from fabric.control.node_calls import AgentSketch
from fabric.hosting.process import keep_pauses_short
from fabric.ids import NodeName
from fabric.settings import RouterSettings
from router.fleet import snapshots
from router.fleet.node_http import NodeHttp
from router.placement.decision import Decision, How
from router.placement.options import options_of
from router.placement.placement import Placement
from router.telemetry import Telemetry
from router.turn_request import TurnRequest
from router.turns.targets import Targets

DESCRIPTION = "the router's own CPU: decisions at 4 to 1,000 nodes, periodic work, heartbeats"

DECISIONS, QUICK_DECISIONS = 1_500, 60
# Nodes and agents of a fleet.
FLEETS = ((4, 1_000), (4, 10_000), (4, 100_000), (32, 10_000), (1_000, 10_000), (1_000, 100_000))
QUICK_FLEETS = ((4, 400), (32, 400))
REPLICATED, QUICK_REPLICATED = (32, 10_000), (4, 400)  # also measured with a replica of each agent
DECIDED, QUICK_DECIDED = (4, 32, 1_000), (4, 32)  # nodes
QUEUE_S = 20.0  # of owners that agents may leave
PASSES = 3  # of the same work: a long step of the router's own occurs in each of them
PERIODIC_S, QUICK_PERIODIC_S = 4.0, 0.5  # of each pass
DECISION_MS_MAX = 1.0
REGRET_MAX = 0.01
STEP_MS_MAX = 5.0
BEAT_PEERS = (0, 3, 16, 63)
BEAT_PIECES = (100, 1_000, 8_000)
STREAM_LIMITS = {"CPU per token [us]": 100.0, "added to the first token, p99 [ms]": 5.0}
UNCHANGED_BYTES_MAX, TURN_BYTES_MAX = 300.0, 400.0
NOTE = (
    "CPU time of one thread, which other work on the processor lengthens: p99 and longest step are "
    "those of the quietest of three passes with the same work"
)


# Tasks of the benchmark itself.
NOT_THE_ROUTERS = {"_take_turns", MemoryNode.__call__.__qualname__}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--seed", type=int, default=0, help="of the fleets (default: %(default)s)")


def run(arguments: argparse.Namespace) -> Report:
    """Measure each fleet in turn."""
    # Nodes without memory refuse every copy; what is measured is the search for the next ones.
    log = logging.getLogger("macfabric.router.moves")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return asyncio.run(_run(arguments))
    finally:
        log.setLevel(level)


async def _run(arguments: argparse.Namespace) -> Report:
    is_quick = arguments.quick
    decisions: dict[str, dict[str, float]] = {}
    periodic: dict[str, dict[str, float]] = {}
    limits: list[Limit] = []
    decided = set(QUICK_DECIDED if is_quick else DECIDED)
    async with NodeHttp(None) as http:
        sizes = [(*size, 0) for size in (QUICK_FLEETS if is_quick else FLEETS)]
        sizes.append((*(QUICK_REPLICATED if is_quick else REPLICATED), 1))
        for nodes, agents, replicas in sizes:
            label = f"{nodes} nodes, {agents} agents{', replicas: 1' if replicas else ''}"
            say(label)
            settings = RouterSettings(replicas=replicas)
            gc.unfreeze()  # garbage of the fleet before
            keep_pauses_short()  # as a router does when it becomes ready, before most lists arrive
            fleet = await start_fleet(http, nodes, agents, arguments.seed, settings)
            if nodes in decided and not replicas:
                decided.discard(nodes)
                count = QUICK_DECISIONS if is_quick else DECISIONS
                passes = [measure_decisions(fleet, count, arguments.seed) for _ in range(PASSES)]
                for kind, figures in _quietest(passes, "p99 [ms]").items():
                    decisions[f"{nodes} nodes, {kind}"] = figures
                limits += _decision_limits(decisions, nodes)
            seconds = QUICK_PERIODIC_S if is_quick else PERIODIC_S
            runs = [await measure_periodic(fleet, seconds) for _ in range(PASSES)]
            tasks = _quietest(runs, "longest step [ms]")
            periodic |= {f"{label}: {task}": figures for task, figures in tasks.items()}
            slowest = max(figures["longest step [ms]"] for figures in tasks.values())
            limits.append(Limit(f"longest step [ms], {label}", slowest, STEP_MS_MAX, False))
        say("streams")
        streams = await measure_streams(http, quick=is_quick)
    parameters = {"decisions": QUICK_DECISIONS if is_quick else DECISIONS, "seed": arguments.seed}
    beats, beat_limits = measure_heartbeats(arguments.seed)
    limits += beat_limits
    limits += [Limit(name, streams[name], most, False) for name, most in STREAM_LIMITS.items()]
    tables = {"decision": decisions, "periodic work": periodic, "heartbeat": beats}
    tables["streams"] = {"over HTTP": streams}
    return Report(parameters, tables, {}, tuple(limits), (NOTE,))


def _quietest(
    passes: Sequence[Mapping[str, dict[str, float]]], figure: str
) -> dict[str, dict[str, float]]:
    """Return each row from the pass in which one of its figures is smallest."""
    names = dict.fromkeys(name for each in passes for name in each)
    rows = {name: [each[name] for each in passes if name in each] for name in names}
    return {name: min(found, key=lambda row: row[figure]) for name, found in rows.items()}


def _decision_limits(rows: Mapping[str, Mapping[str, float]], nodes: int) -> Iterator[Limit]:
    own = [row for name, row in rows.items() if name.startswith(f"{nodes} nodes, ")]
    slowest = max(row["p99 [ms]"] for row in own)
    yield Limit(f"decision p99 [ms], {nodes} nodes", slowest, DECISION_MS_MAX, is_least=False)
    regret = max(row.get("regret", 0.0) for row in own)
    yield Limit(f"regret, {nodes} nodes", regret, REGRET_MAX, is_least=False)


def measure_heartbeats(seed: int) -> tuple[dict[str, dict[str, float]], list[Limit]]:
    """Return the bytes of heartbeats, sent and received, and the bytes that a turn adds."""
    rows: dict[str, dict[str, float]] = {}
    for peers in BEAT_PEERS:
        node = MemoryNode(0, 0, random.Random(seed))
        node.measure([MemoryNode(n + 1, 0, random.Random(seed)) for n in range(peers)])
        rows[f"unchanged, {peers} peers"] = {"bytes": _beat_bytes(node)}
    for pieces in BEAT_PIECES:
        node = MemoryNode(0, 1, random.Random(seed))
        unchanged = _beat_bytes(node)
        listed = node.agents[0]
        node.agents[0] = replace(listed, sketch=tuple(range(1, pieces + 1)))
        node.change(1)
        added = _beat_bytes(node) - unchanged + _list_bytes(node)
        rows[f"added by a turn of {pieces * PIECE_BYTES >> 10} KiB"] = {"bytes": added}
    unchanged = max(row["bytes"] for name, row in rows.items() if "unchanged" in name)
    added = max(row["bytes"] for name, row in rows.items() if "turn" in name)
    return rows, [
        Limit("bytes of an unchanged heartbeat", unchanged, UNCHANGED_BYTES_MAX, is_least=False),
        Limit("bytes that a turn adds", added, TURN_BYTES_MAX, is_least=False),
    ]


def _beat_bytes(node: MemoryNode) -> float:
    """Return the bytes of a heartbeat after the node's first view has arrived."""
    call = encode_call(DescribeChanges(1, 1, 1))
    return float(len(_answer(node, encode_call(DescribeChanges())) and _answer(node, call)))


def _answer(node: MemoryNode, call: bytes) -> bytes:
    answer = node(call)
    try:
        answer.send(None)
    except StopIteration as ended:
        return bytes(ended.value)
    message = "a node in memory answers at once"
    raise AssertionError(message)


def _list_bytes(node: MemoryNode) -> float:
    call = encode_call(ListChanges(1, node.view.changes - 1, COLUMNS))
    return float(len(_answer(node, call)))


def measure_decisions(fleet: BenchFleet, count: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the time of a decision with its snapshot, and the regret of some decisions."""
    draw = random.Random(f"{seed}:turns")
    agents = [agent for node in fleet.nodes for agent in node.agents]
    kinds: dict[str, _Kind] = {
        "owner lives": _Kind(agents, is_named=True),
        "owner has a queue": _Kind(agents, is_named=True, queue_s=QUEUE_S),
        "continued by content": _Kind(agents, is_named=False),
        "continued by content, a queue": _Kind(agents, is_named=False, queue_s=QUEUE_S),
        "new agent, a shared head": _Kind([], is_named=True),
        "new conversation, a shared head": _Kind([], is_named=False),
    }
    return {name: _time_decisions(fleet, draw, kind, count) for name, kind in kinds.items()}


@dataclass(frozen=True, slots=True)
class _Kind:
    """Kind of turns to place: their agents, none for new ones, and the queue at the owners."""

    agents: list[AgentSketch]
    is_named: bool
    queue_s: float = 0.0


def _time_decisions(
    fleet: BenchFleet, draw: random.Random, kind: _Kind, count: int
) -> dict[str, float]:
    times_s = sorted(each.took_s for each in _decide(fleet, draw, kind, count))
    figures = {
        "p50 [ms]": 1e3 * times_s[len(times_s) // 2],
        "p99 [ms]": 1e3 * times_s[int(0.99 * len(times_s))],
    }
    router, regrets = fleet.services.fleet, []
    # In a pass of its own: it reads all nodes, which would leave the timed ones a cold cache.
    for each in _decide(fleet, draw, kind, max(1, count // 10)):
        if each.decision.how not in (How.STAY, How.MOVE):
            whole = snapshots.of_turn(router, each.turn, is_whole=True)
            options = options_of(snapshots.facts_of(each.turn), whole, None)
            options.sort(key=lambda option: -option.terms.total_s)
            costs = {option.node.name: option.terms.total_s for option in options}
            regrets.append(_regret(costs, each.decision.node))
    return figures | ({"regret": sum(regrets) / len(regrets)} if regrets else {})


@dataclass(frozen=True, slots=True)
class _Decided:
    """A decision about a turn, and its CPU time."""

    turn: TurnRequest
    decision: Decision
    took_s: float


def _decide(fleet: BenchFleet, draw: random.Random, kind: _Kind, count: int) -> Iterator[_Decided]:
    """Place turns of a kind; one in ten new ones stays in its node's queue."""
    router = fleet.services.fleet
    targets = Targets(router, Placement(), Telemetry(), moves_agents=True)
    for _ in range(count):
        agent = draw.choice(kind.agents) if kind.agents else None
        turn = turn_of(agent, named=kind.is_named, draw=draw)
        queued = None
        if agent is not None and kind.queue_s:
            queued = router.ledger.begin(agent.view.node, kind.queue_s, cold=False)
        began_s = time.thread_time()
        decision = targets.decide(turn, may_move=True)
        took_s = time.thread_time() - began_s
        if queued is not None:
            router.ledger.end(queued)
        yield _Decided(turn, decision, took_s)
        if queued is None and decision.how not in (How.STAY, How.MOVE):
            entry = router.ledger.begin(decision.node, decision.terms.prefill_s, cold=True)
            if draw.random() < 0.9:
                router.ledger.end(entry)


def _regret(costs: Mapping[NodeName, float], chosen: NodeName) -> float:
    """Return the relative extra cost of the chosen node over the best, beyond the tolerance."""
    best_s = min(costs.values())
    return max(0.0, costs[chosen] - max(best_s + 0.15, 1.1 * best_s)) / max(best_s, 1e-9)


async def measure_periodic(fleet: BenchFleet, seconds: float) -> dict[str, dict[str, float]]:
    """Run the router's background work; return its tasks' steps."""
    fleet.clock.release()
    times = StepTimes()
    times.install()
    work = asyncio.create_task(fleet.services.run())
    turns = asyncio.create_task(_take_turns(fleet))
    await asyncio.sleep(seconds)
    await asyncio.create_task(_read_whole_list(fleet))
    for task in (work, turns):
        task.cancel()
    await asyncio.gather(work, turns, return_exceptions=True)
    asyncio.get_running_loop().set_task_factory(None)
    return {
        name: {
            "longest step [ms]": 1e3 * max(steps_s),
            "CPU per second [ms]": 1e3 * sum(steps_s) / seconds,
        }
        for name, steps_s in sorted(times.steps_s.items())
        if steps_s and sum(steps_s) > 1e-3 and name not in NOT_THE_ROUTERS
    }


async def _read_whole_list(fleet: BenchFleet) -> None:
    """Read a node's whole list, as the router does every ten minutes."""
    membership = fleet.services.fleet.membership
    await membership.heartbeat(membership.members[0], relist=True)


async def _take_turns(fleet: BenchFleet) -> None:
    """Change an agent of one node ten times a second, as turns do."""
    for number in range(1 << 30):
        fleet.nodes[number % len(fleet.nodes)].change(number)
        await asyncio.sleep(0.1)
