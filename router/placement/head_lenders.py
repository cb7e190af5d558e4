"""Choice of the node from which a turn's node takes a beginning that it lacks. Pure.

    fetch      start + bytes / rate < tokens / P
    await      wait + start + bytes / rate ≲ tokens / P      wait: until the lender has computed it,
                                                             beyond the turn's own queue

What is being computed elsewhere is awaited even where that takes as long: the node can serve other
turns meanwhile. The nodes have the last word: the lender knows what it may lend, the other one its
own speed.
"""

import math
from dataclasses import dataclass, replace

from fabric.assumed_speeds import PREFILL_TOKENS_PER_S
from fabric.ids import NodeName
from fabric.limits import BLOCK_TOKENS
from fabric.turn.generation import HeadLoan
from router.limits import HEAD_LOAN_TOKENS_MIN
from router.placement.decision import Load, Recompute, Stay, TurnFacts
from router.placement.link_rates import rate
from router.placement.seconds import prefill_s, ship_s, tie_limit_s
from router.placement.sketch_index import HeadState
from router.placement.snapshot import FleetSnapshot, NodeSnapshot, PrefixHolder


@dataclass(frozen=True, slots=True)
class ChosenLoan:
    """Loan for a turn, with the prefill that it saves its node and the time that it takes."""

    loan: HeadLoan
    tokens: int
    saved_s: float
    travel_s: float


def head_loan(turn: TurnFacts, fleet: FleetSnapshot, target: NodeName) -> ChosenLoan | None:
    """Return the loan by which a turn's node has its prompt as soon as by computing it."""
    home = fleet.nodes.get(target)
    if home is None or not fleet.prefixes or not _takes(home):
        return None
    held = max((_tokens(turn, p) for p in fleet.prefixes if p.node == target), default=0)
    speed = home.prefill_tokens_per_s(turn.prompt_tokens) or PREFILL_TOKENS_PER_S
    options = []
    for prefix in fleet.prefixes:
        lender, more = fleet.nodes.get(prefix.node), _tokens(turn, prefix) - held
        if lender is None or more < HEAD_LOAN_TOKENS_MIN or not _lends(lender, home, prefix):
            continue
        compute_s, size_bytes = prefill_s(more, speed), more * lender.view.bytes_per_token
        fetch_s = ship_s(size_bytes, rate(lender.view, home.view))
        is_coming = prefix.state is HeadState.COMING
        wait_s = _wait_s(lender, home, fleet.now_s) if is_coming else 0.0
        if fetch_s < compute_s and wait_s + fetch_s <= tie_limit_s(compute_s):
            travel_s = wait_s + fetch_s
            options.append((compute_s - travel_s, not is_coming, lender.name, more, travel_s))
    if not options:
        return None
    gain_s, is_stored, name, more, travel_s = max(options)
    loan = HeadLoan(name, fleet.nodes[name].view.addresses, is_coming=not is_stored)
    return ChosenLoan(loan, more, gain_s + travel_s, travel_s)


def with_loan(decision: Stay | Load | Recompute, chosen: ChosenLoan) -> Stay | Load | Recompute:
    """Return the decision with what its node is expected to do if the loan comes."""
    terms = decision.terms
    terms = replace(
        terms,
        bring_s=terms.bring_s + chosen.travel_s,
        prefill_s=max(0.0, terms.prefill_s - chosen.saved_s),
    )
    prefill_s = max(0.0, decision.prefill_s - chosen.saved_s)
    return replace(decision, prefill_s=prefill_s, terms=terms)


def _tokens(turn: TurnFacts, prefix: PrefixHolder) -> int:
    """Return the estimated tokens of a prompt that a node has, in whole blocks."""
    return math.floor(prefix.share * turn.prompt_tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def _takes(node: NodeSnapshot) -> bool:
    return node.view.protocol is not None and node.view.reuse and node.view.degraded is None


def _lends(lender: NodeSnapshot, home: NodeSnapshot, prefix: PrefixHolder) -> bool:
    """Return whether a node may lend what it has to another one of the same model and version."""
    ours, theirs = home.view, lender.view
    is_alike = theirs.fingerprint == ours.fingerprint and theirs.protocol == ours.protocol
    is_other = lender.name != home.name and prefix.state is not HeadState.BORROWED
    return is_alike and is_other and lender.is_alive and theirs.reuse


def _wait_s(lender: NodeSnapshot, home: NodeSnapshot, now_s: float) -> float:
    """Estimate the seconds for which a turn waits beyond its own queue until a lender is ready."""
    return max(0.0, lender.queue_s(now_s) - home.queue_s(now_s))
