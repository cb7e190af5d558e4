"""The prompt of an answer that another node began: the agent's record, token for token."""

from dataclasses import replace

from fabric.errors import ConflictError
from fabric.record.manifest import Manifest
from fabric.turn.generation import MatchKind, Resumption
from fabric.turn.prompt_plan import PromptPlan

REASON = "continues an answer that was begun on another node"


def plan_resumption(record: Manifest, resume: Resumption) -> PromptPlan:
    """Plan to have the record's tokens in the cache and to feed the sampled one next.

    Raises ConflictError where the record does not end with this very answer.
    """
    count = record.prompt_tokens_count
    if not count or record.token_ids[count:] != resume.answer_ids:
        message = "the agent's context does not end with the answer that is to be continued"
        raise ConflictError(message, code="cannot_resume")
    ids, ends = list(record.token_ids), list(record.token_ends)
    return PromptPlan(
        text=record.text.encode(),
        ids=[*ids, resume.sampled],
        ends=[*ends, ends[-1]],
        kept_tokens=len(ids),
        match=MatchKind.EXTEND,
        reason=REASON,
    )


def without_answer(plan: PromptPlan, record: Manifest) -> PromptPlan:
    """Return the plan of the prompt alone: what follows it is counted as the answer."""
    count = record.prompt_tokens_count
    ends = plan.ends[:count]
    return replace(
        plan, text=plan.text[: ends[-1]], ids=plan.ids[:count], ends=ends, kept_tokens=count
    )
