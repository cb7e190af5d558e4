"""Beginnings that other nodes send, as ways to serve a turn. Pure.

    fetch      start + bytes / rate  < tokens / P
    await      the same, and at least until the lender has computed them

They arrive while the turn waits in its node's queue. The nodes have the final decision: the lender
knows what it may lend, the borrower its own speed.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from fabric.assumed_speeds import PREFILL_TOKENS_PER_S
from fabric.limits import BLOCK_TOKENS
from fabric.turn.generation import HeadLoan
from router.limits import HEAD_LOAN_TOKENS_MIN, LENDERS_MAX
from router.placement.decision import How, TurnFacts
from router.placement.link_rates import rate
from router.placement.seconds import (
    Job,
    NodeCandidate,
    Option,
    coming_s,
    prefill_s,
    ship_s,
    terms_of,
)
from router.placement.sketch_index import HeadState
from router.placement.snapshot import FleetSnapshot, NodeSnapshot, PrefixHolder

LONG_CHUNK_S: Final = 1.0  # time to compute one chunk of a long prompt


@dataclass(frozen=True, slots=True)
class _Lender:
    node: NodeSnapshot
    tokens: int  # tokens of the prompt that it has or computes, in whole blocks
    wait_s: float  # time until it has computed them
    chunk_tokens: int  # size of the last chunk that it computes
    loan: HeadLoan


def fetches_of(
    turn: TurnFacts, job: Job, fleet: FleetSnapshot, options: Iterable[Option]
) -> list[Option]:
    """Return the ways to serve a turn where others would, with beginnings from other nodes."""
    longest = fleet.prefixes[0].share if fleet.prefixes and turn.may_fetch else 0.0
    most = longest * turn.prompt_tokens - HEAD_LOAN_TOKENS_MIN
    lacking = [option for option in options if option.node.cached_tokens <= most]
    lenders = _lenders(turn, fleet) if lacking else []
    if not lenders:
        return []
    borrowed = {
        prefix.node: _tokens(turn, prefix)
        for prefix in fleet.prefixes
        if prefix.state is HeadState.BORROWED
    }
    fetches: list[Option] = []
    for option in lacking:
        home = fleet.nodes[option.node.name]
        if not _takes(home):
            continue
        how = How.STAY if option.how is How.STAY else How.FETCH
        for lender in lenders:
            found = _carried_size(lender, home, option.node, borrowed.get(home.name, 0))
            if found is not None:
                carried_bytes, travel_s = found
                node = replace(option.node, cached_tokens=lender.tokens, coming_s=0.0)
                terms = terms_of(job, node, travel_s=travel_s)
                loan = lender.loan
                fetches.append(Option(how, node, terms, loan=loan, carried_bytes=carried_bytes))
    return fetches


def _carried_size(
    lender: _Lender, home: NodeSnapshot, node: NodeCandidate, borrowed_tokens: int
) -> tuple[int, float] | None:
    """Return the bytes to fetch and the seconds until they arrive; None if it is not worth it.

    Tokens that the node borrows for other turns are sent once; a lender that still computes sends
    one chunk after another.
    """
    more = lender.tokens - node.cached_tokens
    if more < HEAD_LOAN_TOKENS_MIN or not _lends(lender.node, home):
        return None
    carried = lender.tokens - max(node.cached_tokens, borrowed_tokens)
    size_bytes = carried * lender.node.view.bytes_per_token
    bytes_per_s = rate(lender.node.view, home.view)
    fetch_s = ship_s(size_bytes, bytes_per_s)
    if fetch_s >= prefill_s(more, node.prefill_tokens_per_s):
        return None
    last_bytes = min(size_bytes, lender.chunk_tokens * lender.node.view.bytes_per_token)
    after_s = lender.wait_s + ship_s(last_bytes, bytes_per_s) if lender.wait_s else 0.0
    ahead_s = lender.node.leaving_bytes / bytes_per_s
    return size_bytes, max(after_s, fetch_s) + ahead_s


def _lenders(turn: TurnFacts, fleet: FleetSnapshot) -> list[_Lender]:
    """Return the nodes with the longest beginnings of a prompt, those that wait least first."""
    lenders: list[_Lender] = []
    for prefix in fleet.prefixes:
        node, tokens = fleet.nodes.get(prefix.node), _tokens(turn, prefix)
        if tokens < HEAD_LOAN_TOKENS_MIN or prefix.state is HeadState.BORROWED or node is None:
            continue
        if not (node.is_alive and node.view.reuse and node.view.model == turn.model):
            continue
        is_coming = prefix.state is HeadState.COMING
        per_s = node.prefill_tokens_per_s(tokens) or PREFILL_TOKENS_PER_S
        lead_s = prefill_s(tokens, per_s)
        wait_s = coming_s(node.queue_s(fleet.now_s), node.prompts_s, lead_s) if is_coming else 0.0
        loan = HeadLoan(node.name, node.view.addresses, is_coming=is_coming)
        lenders.append(_Lender(node, tokens, wait_s, round(per_s * LONG_CHUNK_S), loan))
    lenders.sort(key=lambda each: (-each.tokens, each.wait_s, each.node.turns, each.node.name))
    return lenders[:LENDERS_MAX]


def _tokens(turn: TurnFacts, prefix: PrefixHolder) -> int:
    """Return the estimated tokens of a prompt that a node has, in whole blocks."""
    return math.floor(prefix.share * turn.prompt_tokens) // BLOCK_TOKENS * BLOCK_TOKENS


def _takes(node: NodeSnapshot) -> bool:
    return node.view.protocol is not None and node.view.reuse and node.view.degraded is None


def _lends(lender: NodeSnapshot, home: NodeSnapshot) -> bool:
    """Return whether a node may lend what it has to another one of the same model and version."""
    home_view, lender_view = home.view, lender.view
    is_alike = (
        lender_view.fingerprint == home_view.fingerprint
        and lender_view.protocol == home_view.protocol
    )
    return is_alike and lender.name != home.name
