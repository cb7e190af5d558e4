"""The fabric as a fleet of the simulator: its nodes' speeds as turns have shown them, and sizes."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

from fabric.control.node_calls import NodeView
from router.fleet.fleet import Fleet
from router.placement.profiles import BATCHES, POSITIONS, NodeProfile

POSITION_MIDDLES: Final = (2_048, 10_240, 40_960, 98_304)  # of the buckets of a profile
BATCH_MIDDLES: Final = (1.0, 2.0, 3.5, 6.5, 12.0)
BATCH_EXPONENT: Final = 0.5  # as decode profiles assume
CONTEXT_HALF_TOKENS: Final = 65_536  # where one position alone is known
CONSTANT_SPEED_TOKENS: Final = 1 << 30  # position of half the speed where it does not fall
LINE_SHARE: Final = 0.8  # of a link's rate, as the simulator has it
BYTES_PER_MBIT: Final = 125_000


def fleet_model(fleet: Fleet) -> dict[str, Any]:
    """Return a fleet for `macfabric simulate --fleet`, of the nodes of the first model."""
    views = [member.view for member in fleet.membership.members if member.view is not None]
    model = min((view.model for view in views), default=None)
    alike = [view for view in views if view.model == model]
    size_bytes = max((view.bytes_per_token for view in alike), default=0)
    return {
        "name": "fabric",
        "kv_bytes_per_token": size_bytes,
        "nodes": [_node(view, fleet.profiles.of(view.name)) for view in alike],
    }


def _node(view: NodeView, profile: NodeProfile) -> dict[str, Any]:
    node: dict[str, Any] = {"name": view.name}
    prefill, half_tokens = _prefill(profile, view.prefill_tokens_per_s)
    decode, exponent = _decode(profile, view.decode_tokens_per_s)
    if prefill > 0:
        node |= {"prefill_tokens_per_s": round(prefill, 1), "context_half_tokens": half_tokens}
    if decode > 0:
        node |= {"decode_tokens_per_s": round(decode, 2), "batch_exponent": round(exponent, 3)}
    if view.free is not None:
        node["hot_bytes"] = max(1, view.free.hot + view.bytes.hot)
        node["disk_bytes"] = max(1, view.free.disk + view.bytes.disk)
    rates = [link.bytes_per_s for link in view.links if link.reachable and link.bytes_per_s]
    if rates:
        node["link_mbit"] = round(max(rates) / LINE_SHARE / BYTES_PER_MBIT, 1)
    return node


def _prefill(profile: NodeProfile, reported: float) -> tuple[float, int]:
    """Fit speed(p) = P / (1 + p/h): the seconds of a token are a line over its position."""
    speeds = _known_speeds(profile.prefill, POSITION_MIDDLES[: len(POSITIONS) + 1])
    if not speeds:
        return reported, CONTEXT_HALF_TOKENS
    if len(speeds) == 1:
        position, speed = speeds[0]
        return speed * (1 + position / CONTEXT_HALF_TOKENS), CONTEXT_HALF_TOKENS
    start, slope = _line([(position, 1 / speed) for position, speed in speeds])
    if start <= 0:  # it falls faster than in proportion: the first position is the surest
        start, slope = 1 / speeds[0][1], 0.0
    half = CONSTANT_SPEED_TOKENS if slope <= 0 else min(CONSTANT_SPEED_TOKENS, round(start / slope))
    if half == CONSTANT_SPEED_TOKENS:
        start = fmean(1 / speed for _, speed in speeds)
    return 1 / start, max(1, half)


def _decode(profile: NodeProfile, reported: float) -> tuple[float, float]:
    """Fit speed(b) = D / b^e, from speeds that were noted with e = BATCH_EXPONENT."""
    speeds = _known_speeds(profile.decode, BATCH_MIDDLES[: len(BATCHES) + 1])
    if len(speeds) < 2:
        return (speeds[0][1] if speeds else reported), BATCH_EXPONENT
    start, slope = _line([(math.log(batch), math.log(speed)) for batch, speed in speeds])
    return math.exp(start), min(1.0, max(0.0, BATCH_EXPONENT - slope))


def _known_speeds(
    speeds: Sequence[float | None], middles: Sequence[float]
) -> list[tuple[float, float]]:
    pairs = zip(middles, speeds, strict=True)
    return [(middle, speed) for middle, speed in pairs if speed is not None and speed > 0]


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return start and slope of the line of least squares."""
    x_mean, y_mean = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / spread
    return y_mean - slope * x_mean, slope
