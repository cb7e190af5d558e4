"""Attributes of a turn's spans: names of nodes, counts and decisions, and digests of the rest."""

from fabric.hosting.otel_spans import Attribute
from fabric.hosting.tracing import Span, begin_span
from fabric.turn.generation import Admitted
from router.fleet.fleet import Fleet
from router.turn_request import TurnRequest
from router.turns.open_turn import EndedTurn
from router.turns.targets import Target


def begin_turn_span(fleet: Fleet, turn: TurnRequest) -> Span:
    """Begin a turn's span, as a part of its client's if that was sent."""
    return begin_span(
        "turn",
        turn=turn.id,
        tenant=fleet.tenant_alias(turn.tenant),
        model=turn.model,
        priority=turn.priority.value,
    )


def note_admission(span: Span, first: Admitted, alias: str) -> None:
    """Note where a turn runs and what of its prompt was reused; `alias` names its agent."""
    span.note(
        agent=alias,
        node=first.node,
        epoch=first.epoch,
        cache=first.cache.value,
        match=first.match.value,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        fetched_tokens=first.fetched_tokens,
    )


def end_turn_span(span: Span, ended: EndedTurn) -> None:
    """End a turn's span; a part that its node has not sent is not known."""
    first_s = ended.times.first_token_s if ended.times is not None else None
    span.note(
        outcome=ended.outcome, completion_tokens=ended.completion_tokens, first_token_s=first_s
    )
    span.end(None if ended.outcome == "ok" else ended.outcome)


def target_facts(target: Target) -> dict[str, Attribute]:
    """Return the attributes of a decision's span."""
    decision = target.decision
    if decision is None:
        return {"node": target.node}
    return {
        "node": target.node,
        "how": decision.how.value,
        "queue_estimate_s": decision.terms.queue_s,
        "load_estimate_s": decision.terms.load_s,
        "prefill_estimate_s": decision.terms.prefill_s,
        "first_token_estimate_s": decision.terms.first_token_s,
    }
