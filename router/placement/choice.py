"""Choice among the options to serve a turn: by seconds, or by the rule of a baseline. Pure."""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum

from fabric.ids import NodeName
from router.placement.decision import How
from router.placement.seconds import NodeCandidate, Option, tie_limit_s


class Policy(StrEnum):
    """Placement policy; all but SECONDS are baselines for comparison."""

    SECONDS = "seconds"
    LEAST_LOAD = "least-load"
    ROUND_ROBIN = "round-robin"


def choose(
    options: Sequence[Option],
    home: NodeName | None,
    policy: Policy,
    full: AbstractSet[NodeName] = frozenset(),
) -> Option:
    """Choose an option, regardless of their order.

    By seconds, `home` is preferred among nodes that cost about the same. An agent whose node is
    one of the `full` ones leaves it at any price.
    """
    if len(options) == 1:
        return options[0]
    stays = [option for option in options if option.how is How.STAY]
    moves = [option for option in options if option.how is How.MOVE]
    if moves and stays[0].node.name in full:
        return min(moves, key=lambda move: (move.terms.total_s, move.node.name))
    if policy is not Policy.SECONDS:
        node = min((option.node for option in options), key=_ORDERS[policy])
        return _best_way([option for option in options if option.node.name == node.name])
    if stays:
        return _stay_or_move(_best_way(stays), moves)
    return _cheapest(options, home)


def _stay_or_move(stay: Option, moves: Sequence[Option]) -> Option:
    """Choose the move with the earliest first token among those sooner than staying by their price.

    Without one, stay. The answer must not end later either.
    """
    staying = stay.terms
    sooner = [
        move
        for move in moves
        if move.terms.felt_s + move.terms.price_s < staying.felt_s
        if move.terms.felt_s + move.terms.answer_s <= staying.felt_s + staying.answer_s
    ]
    order = ((move.terms.felt_s, move.node.held_tokens, move.node.name) for move in sooner)
    return min(zip(order, sooner, strict=True), key=lambda each: each[0], default=(None, stay))[1]


def _cheapest(options: Sequence[Option], home: NodeName | None) -> Option:
    """Choose the cheapest node; of those that cost about the same, the emptiest."""
    limit_s = tie_limit_s(min(option.terms.total_s for option in options))
    about_equal = [option for option in options if option.terms.total_s <= limit_s]
    nodes = {option.node.name: option.node for option in about_equal}
    name = home if home in nodes else min(nodes.values(), key=_fill).name
    return _best_way([option for option in options if option.node.name == name])


def _best_way(options: Sequence[Option]) -> Option:
    """Choose among the ways of one node: of those that cost about the same, the least computing.

    The node can serve other turns while it waits for what another one computes.
    """
    limit_s = tie_limit_s(min(option.terms.total_s for option in options))
    return min((each for each in options if each.terms.total_s <= limit_s), key=_computing)


def _computing(option: Option) -> tuple[float, float, str]:
    lender = option.loan.source if option.loan is not None else ""
    return option.terms.prefill_s, option.terms.total_s, lender


def _fill(node: NodeCandidate) -> tuple[float, int, int, str]:
    return node.agents / node.weight, node.cold_order, node.held_tokens, node.name


def _load(node: NodeCandidate) -> tuple[float, int, int, str]:
    return node.queue_s, node.active, node.turn_order, node.name


def _turn(node: NodeCandidate) -> tuple[int, str]:
    return node.turn_order, node.name


_ORDERS: dict[Policy, Callable[[NodeCandidate], tuple[object, ...]]] = {
    Policy.LEAST_LOAD: _load,
    Policy.ROUND_ROBIN: _turn,
}
