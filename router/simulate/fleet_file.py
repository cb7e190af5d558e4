"""Fleets of modelled nodes, from YAML files."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from fabric.assumed_speeds import DECODE_TOKENS_PER_S, DISK_BYTES_PER_S, PREFILL_TOKENS_PER_S
from fabric.errors import RejectedError
from fabric.limits import ACTIVE_SEQUENCES_MAX, GIB, HEARTBEAT_S
from fabric.settings_reader import SettingProblem, read_class, require_no_problems
from router.limits import SIMULATED_FLEET_BYTES_MAX, SIMULATED_NODES_MAX

SHIPPED = Path(__file__).parent / "fleets"


@dataclass(frozen=True, slots=True)
class NodeModel:
    """Speeds and sizes of one kind of node, and how many of them there are."""

    name: str = "mac"
    count: int = 1
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S  # of the first tokens of a prompt
    decode_tokens_per_s: float = DECODE_TOKENS_PER_S  # of a sequence alone
    context_half_tokens: int = 65_536  # position at which prefill has half its speed
    batch_exponent: float = 0.5  # a sequence's speed falls with the batch size to this power
    active_max: int = ACTIVE_SEQUENCES_MAX
    hot_bytes: int = 16 * GIB
    disk_bytes: int = 256 * GIB
    disk_bytes_per_s: float = DISK_BYTES_PER_S
    link_mbit: float = 1_000.0  # of its fastest interface, shared by all its transfers


@dataclass(frozen=True, slots=True)
class FleetModel:
    """Nodes of a simulated fabric, and what all of them have in common."""

    name: str = "fleet"
    kv_bytes_per_token: int = 36_864  # an 8B model at 4 bits
    heartbeat_s: float = HEARTBEAT_S
    chunk_tokens_max: int = 4_096  # of a prompt, that its devices compute best
    # Whether a prompt waits for the same beginning that another turn is computing on the node.
    shares_heads_in_flight: bool = True
    lends_heads: bool = True  # whether a node sends another one beginnings that it has or computes
    nodes: tuple[NodeModel, ...] = field(default=())

    def each(self) -> Iterator[NodeModel]:
        """Yield every node with a name of its own."""
        for model in self.nodes:
            digits = len(str(model.count))
            for number in range(1, model.count + 1):
                suffix = f"-{number:0{digits}d}" if model.count > 1 else ""
                yield replace(model, name=f"{model.name}{suffix}", count=1)

    @property
    def count(self) -> int:
        return sum(model.count for model in self.nodes)

    @property
    def hot_tokens(self) -> int:
        """Tokens that the memories of all nodes hold."""
        hot_bytes = sum(model.count * model.hot_bytes for model in self.nodes)
        return hot_bytes // self.kv_bytes_per_token

    def with_link_mbit(self, link_mbit: float) -> "FleetModel":
        """Return the fleet with other links."""
        nodes = tuple(replace(model, link_mbit=link_mbit) for model in self.nodes)
        return replace(self, nodes=nodes)


def shipped_names() -> list[str]:
    """List the fleets that are part of the product."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def read_fleet(name: str) -> FleetModel:
    """Read a shipped fleet by name, or a file; raise RejectedError with every mistake."""
    shipped = SHIPPED / f"{name}.yaml"
    path = shipped if name in shipped_names() else Path(name)
    if not path.is_file():
        message = f"no fleet is called {name!r}, and no file; shipped: {', '.join(shipped_names())}"
        raise RejectedError(message, code="unknown_fleet")
    if path.stat().st_size > SIMULATED_FLEET_BYTES_MAX:
        message = f"{path}: a fleet has at most {SIMULATED_FLEET_BYTES_MAX} bytes"
        raise RejectedError(message, code="invalid_fleet")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = f"{path} is not YAML: {error}"
        raise RejectedError(message, code="invalid_fleet") from None
    return parse_fleet(tree)


def parse_fleet(tree: Any) -> FleetModel:
    """Read a fleet from plain data; raise RejectedError with every mistake."""
    problems: list[SettingProblem] = []
    fleet: FleetModel = read_class(FleetModel, tree, "fleet", problems)
    require_no_problems(problems or list(_mistakes(fleet)))
    return fleet


def _mistakes(fleet: FleetModel) -> Iterator[SettingProblem]:
    if not 1 <= fleet.count <= SIMULATED_NODES_MAX:
        yield SettingProblem("fleet.nodes", f"must be 1-{SIMULATED_NODES_MAX} nodes together")
    for name in ("kv_bytes_per_token", "chunk_tokens_max"):
        if getattr(fleet, name) <= 0:
            yield SettingProblem(f"fleet.{name}", "must be positive")
    if not 0 < fleet.heartbeat_s < 3:  # a node that is silent for longer is suspect
        yield SettingProblem("fleet.heartbeat_s", "must be below 3 seconds")
    names = [model.name for model in fleet.nodes]
    for number, model in enumerate(fleet.nodes):
        if names.count(model.name) > 1:
            message = f"{model.name} occurs twice: use `count`"
            yield SettingProblem(f"fleet.nodes[{number}].name", message)
        yield from _mistakes_of(model, f"fleet.nodes[{number}]")


def _mistakes_of(model: NodeModel, where: str) -> Iterator[SettingProblem]:
    speeds = ("prefill_tokens_per_s", "decode_tokens_per_s", "context_half_tokens")
    for name in (*speeds, "count", "active_max", "hot_bytes", "disk_bytes"):
        if getattr(model, name) <= 0:
            yield SettingProblem(f"{where}.{name}", "must be positive")
    if model.disk_bytes_per_s <= 0 or model.link_mbit <= 0:
        yield SettingProblem(where, "disk_bytes_per_s and link_mbit must be positive")
    if not 0 <= model.batch_exponent <= 1:
        yield SettingProblem(f"{where}.batch_exponent", "must be 0-1")
