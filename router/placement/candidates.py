"""The few nodes among which a turn is placed, out of any number. Pure.

    rank     one row per ready node: its queue, its speeds, its agents; one pass of plain arithmetic
    near     of the nodes that cost about the least, those with the fewest agents for their speed

The row of a node is written when the node changes, so a decision computes with numbers instead of
reading a thousand views.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from xxhash import xxh3_64

from fabric.assumed_speeds import PREFILL_TOKENS_PER_S
from fabric.ids import NodeName
from router.limits import PREFIX_ROWS_MAX
from router.placement.decision import ANSWER_WEIGHT
from router.placement.seconds import (
    CHUNK_S,
    DECODE_TOKENS_EXPECTED,
    SHARE_S,
    SHARE_SLACK,
    SHORT_PROMPT_TOKENS,
    TOKENS_PER_S_MIN,
    answer_factor,
    class_weight,
    tie_limit_s,
)
from router.placement.sketch_index import NodeCounts
from router.placement.snapshot import FleetTotals, NodeSnapshot

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Column = npt.NDArray[np.float64]
    Rows = npt.NDArray[np.intp]

_REWEIGHED_SHARE = 0.05  # change of the median speed after which all weights are recomputed
_RING_POINTS = 8  # points of a node on the ring of homes
_FIRST_ROWS = 64
# Columns: seconds of the queue, and of its known prompts; their number; seconds per token of
# prompts, and of answers with what others lose; the factor of heat; the agents per weight from
# which a node has its share; its weight; and what orders nodes of equal cost.
_QUEUE, _KNOWN, _COUNT, _PROMPT, _ANSWER, _SLOW, _FULLNESS, _WEIGHT = range(8)
_FILL, _COLD, _HELD, _COLUMNS = range(8, 12)


@dataclass(frozen=True, slots=True)
class TurnWork:
    """Tokens of a turn's prompt and answer."""

    prompt_tokens: float
    answer_tokens: float

    @classmethod
    def of(cls, prompt_tokens: float, completion_tokens_max: int) -> "TurnWork":
        return cls(prompt_tokens, min(completion_tokens_max, DECODE_TOKENS_EXPECTED))


@dataclass(frozen=True, slots=True)
class Cached:
    """Tokens of a prompt, and the nodes that have them cached."""

    tokens: float
    nodes: NodeCounts


class Ranking:
    """Ready nodes of one model, in columns."""

    def __init__(self) -> None:
        import numpy as np  # a quarter of a second, which a small fleet's router need not wait

        self._np = np
        self._rows: dict[NodeName, int] = {}
        self._nodes: list[NodeSnapshot] = []
        self._speeds: list[tuple[float, float]] = []  # of prompts and answers; 0 if unknown
        self._table = np.zeros((_COLUMNS, _FIRST_ROWS))
        self._prefill: list[float] = []  # measured speeds, sorted
        self._prefill_sum = 0.0
        self._decode_sum, self._decode_count = 0.0, 0
        self._agents_sum, self._weights_sum = 0, 0.0
        self._turns_sum = 0
        self._weighed_at = PREFILL_TOKENS_PER_S
        self._ring: list[tuple[int, NodeName]] = []
        # Rows of the nodes with a prefix, by the prefix; valid until nodes come or go.
        self._known_rows: OrderedDict[int, tuple[NodeCounts, int, Rows]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def put(self, node: NodeSnapshot) -> None:
        """Write a node's row."""
        row = self._rows.get(node.name)
        if row is not None and self._nodes[row] is node:
            return
        if row is None:
            row = self._rows[node.name] = len(self._nodes)
            self._nodes.append(node)
            self._speeds.append((0.0, 0.0))
            if row == self._table.shape[1]:
                self._table = self._np.concatenate([self._table, self._table * 0.0], axis=1)
            self._known_rows.clear()
            for point in _points(node.name):
                insort(self._ring, (point, node.name))
        else:
            self._discount(row)
        self._nodes[row] = node
        self._note_speeds(row, node.prefill_tokens_per_s(), node.decode_tokens_per_s)
        self._agents_sum += node.agents
        self._turns_sum += node.turns
        self._write(row)
        moved = abs(self._prefill_median - self._weighed_at)
        if moved > _REWEIGHED_SHARE * self._weighed_at:
            self._weighed_at = self._prefill_median
            for each in range(len(self._nodes)):
                self._write(each)

    def drop(self, name: NodeName) -> None:
        """Remove a node's row; the last row takes its place."""
        row = self._rows.pop(name, None)
        if row is None:
            return
        self._discount(row)
        self._note_speeds(row, 0.0, 0.0)
        last, speeds = self._nodes.pop(), self._speeds.pop()
        self._known_rows.clear()
        if last.name != name:
            self._nodes[row], self._rows[last.name] = last, row
            self._speeds[row] = speeds
            self._table[:, row] = self._table[:, len(self._nodes)]
        self._table[:, len(self._nodes)] = 0.0
        for point in _points(name):
            del self._ring[bisect_left(self._ring, (point, name))]

    @property
    def totals(self) -> FleetTotals:
        """Totals from which a node's share and an unmeasured node's speed follow."""
        return FleetTotals(
            prefill_mean=self._prefill_mean,
            prefill_median=self._prefill_median,
            decode_mean=self._decode_mean,
            agents=self._agents_sum,
            weights=self._weights_sum,
            is_calm=self._is_calm,
        )

    def cheapest(
        self,
        work: TurnWork,
        count: int,
        is_taken: Callable[[NodeName], bool],
        cached: Sequence[Cached] = (),
    ) -> list[NodeName]:
        """Return up to `count` nodes that cost least, of which `is_taken` holds for none.

        `cached` has what nodes have of the prompt; of a node in several, the last one counts.
        """
        if not self._nodes:
            return []
        costs = self._costs(work, cached)
        near = self._np.flatnonzero(costs <= tie_limit_s(float(costs.min())))
        if len(near) > count:
            fill, cold, held = self._table[_FILL : _HELD + 1, near]
            near = near[self._np.lexsort((held, cold, fill))]
        found = best = self._take(near[: 2 * count].tolist(), count, is_taken)
        for most in (4 * count, len(costs)):
            if len(found) < count:
                rows = self._cheapest_rows(costs, most)
                more = self._take(rows, count, lambda name: name in best or is_taken(name))
                found = [*best, *more][:count]
        return found

    def _cheapest_rows(self, costs: "Column", most: int) -> list[int]:
        """Return about `most` rows by cost, equal ones in the same order anywhere."""
        rows = self._np.arange(len(costs))
        if most < len(costs):
            limit = self._np.partition(costs, most)[most]
            rows = self._np.flatnonzero(costs <= limit)
        ordered: list[int] = rows[costs[rows].argsort(kind="stable")].tolist()
        return ordered

    def homes(self, seed: str, count: int, is_taken: Callable[[NodeName], bool]) -> list[NodeName]:
        """Return the nodes that a seed chooses: always the same of the same nodes."""
        start = bisect_left(self._ring, (text_hash(seed), NodeName("")))
        found: dict[NodeName, None] = {}
        for at in range(len(self._ring)):
            name = self._ring[(start + at) % len(self._ring)][1]
            if name not in found and not is_taken(name):
                found[name] = None
                if len(found) == count:
                    break
        return list(found)

    @property
    def _prefill_mean(self) -> float:
        count = len(self._prefill)
        return self._prefill_sum / count if count else PREFILL_TOKENS_PER_S

    @property
    def _prefill_median(self) -> float:
        count = len(self._prefill)
        return self._prefill[count // 2] if count else PREFILL_TOKENS_PER_S

    @property
    def _is_calm(self) -> bool:
        return not self._turns_sum

    @property
    def _decode_mean(self) -> float:
        return self._decode_sum / self._decode_count if self._decode_count else 0.0

    def _take(
        self, rows: Iterable[int], count: int, is_taken: Callable[[NodeName], bool]
    ) -> list[NodeName]:
        names = (self._nodes[row].name for row in rows)
        return list(islice((name for name in names if not is_taken(name)), count))

    def _costs(self, work: TurnWork, cached: Sequence[Cached]) -> "Column":
        """Return each node's cost of a turn, the total of `seconds.terms_of`, by row."""
        np, table = self._np, self._table[:, : len(self._nodes)]
        share = SHARE_SLACK * (self._agents_sum + 1) / max(self._weights_sum, 1e-9)
        uncached_tokens = np.full(len(self._nodes), work.prompt_tokens)
        for part in cached:
            uncached_tokens[self._rows_of(part.nodes)] = work.prompt_tokens - part.tokens
        answer_s = work.answer_tokens * table[_ANSWER]
        own_s = np.maximum(uncached_tokens, 0.0) * table[_PROMPT]
        # Each known prompt delays this one, and this one each of them, by no more than its length.
        turns_s = np.minimum(table[_KNOWN], table[_COUNT] * own_s)
        unknown_s = table[_QUEUE] - table[_KNOWN]
        is_short = uncached_tokens <= SHORT_PROMPT_TOKENS
        waits_s = np.where(is_short, np.minimum(table[_QUEUE], CHUNK_S), unknown_s + turns_s)
        delays_s = turns_s + np.minimum(unknown_s, own_s)
        slow_s = (own_s + answer_s) * (table[_SLOW] - 1.0)
        costs: Column = waits_s + delays_s + own_s + ANSWER_WEIGHT * answer_s + slow_s
        penalty_s = self._np.full(len(uncached_tokens), SHARE_S)
        if self._is_calm:
            penalty_s = np.maximum(SHARE_S, work.prompt_tokens * table[_PROMPT] + answer_s)
        costs += (table[_FULLNESS] > share) * penalty_s
        return costs

    def _rows_of(self, nodes: NodeCounts) -> "Rows":
        """Return the rows of the nodes that have a prefix."""
        entry = self._known_rows.get(id(nodes))
        if entry is None or entry[0] is not nodes or entry[1] != nodes.changes:
            rows = [self._rows[name] for name in nodes if name in self._rows]
            entry = nodes, nodes.changes, self._np.array(rows, dtype=self._np.intp)
            self._known_rows[id(nodes)] = entry
            if len(self._known_rows) > PREFIX_ROWS_MAX:
                self._known_rows.popitem(last=False)
        return entry[2]

    def _discount(self, row: int) -> None:
        node = self._nodes[row]
        self._agents_sum -= node.agents
        self._turns_sum -= node.turns
        self._weights_sum -= float(self._table[_WEIGHT, row])
        self._table[_WEIGHT, row] = 0.0

    def _note_speeds(self, row: int, prefill: float, decode: float) -> None:
        """Replace a node's speeds in the sums and in the order of all."""
        old_prefill, old_decode = self._speeds[row]
        self._speeds[row] = prefill, decode
        if prefill != old_prefill:
            if old_prefill > 0:
                del self._prefill[bisect_left(self._prefill, old_prefill)]
            if prefill > 0:
                insort(self._prefill, prefill)
            self._prefill_sum += prefill - old_prefill
        self._decode_sum += decode - old_decode
        self._decode_count += (decode > 0) - (old_decode > 0)

    def _write(self, row: int) -> None:
        """Write the columns of a row from its node."""
        node, (prefill, decode) = self._nodes[row], self._speeds[row]
        prefill, decode = prefill or self._prefill_mean, decode or self._decode_mean
        per_s = max(decode, TOKENS_PER_S_MIN)
        answer_s = answer_factor(node.turns) / per_s if decode > 0 else 0.0
        weight = class_weight(prefill / self._weighed_at)
        self._weights_sum += weight - float(self._table[_WEIGHT, row])
        known_s = sum(node.prompts_s)
        self._table[:, row] = (
            max(node.promised_s, known_s),
            known_s,
            len(node.prompts_s),
            1.0 / max(prefill, TOKENS_PER_S_MIN),
            answer_s,
            node.slowness,
            (node.agents + 0.5) / weight if node.agents else 0.0,  # one agent is no overload
            weight,
            node.agents / weight,
            node.cold_order,
            node.held_tokens,
        )


def _points(name: NodeName) -> list[int]:
    return [text_hash(f"{name}:{point}") for point in range(_RING_POINTS)]


def text_hash(text: str) -> int:
    """Return a hash of a text, equal in every process."""
    return xxh3_64(text.encode("utf-8", "surrogatepass")).intdigest()
