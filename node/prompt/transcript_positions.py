"""Where the messages of a prompt are, and the answer to it: by that they are named later."""

from dataclasses import replace

from fabric.record.manifest import Manifest
from fabric.record.message_parts import OtherParts, other_parts
from fabric.record.pending_edits import edits_of
from fabric.record.said import SaidMessages, Spoken, place, said_digest
from fabric.turn.prompt_limit import PromptLimit
from fabric.turn.prompt_plan import PromptPlan
from node.dialect.folding import Rendered
from node.prompt.directed_request import DirectedRequest
from node.prompt.prompt_encoder import PromptEncoder
from node.prompt.restored_answers import ShownAnswer


def planned(
    prompts: PromptEncoder,
    made: DirectedRequest,
    record: Manifest,
    rendered: Rendered,
    limit: PromptLimit,
) -> tuple[PromptPlan, DirectedRequest]:
    """Plan a prompt, and find its messages between the template's marks."""
    plan = replace(prompts.plan(made.request, record, rendered, limit), note=made.note)
    if not made.spoken:
        return plan, made
    ends, markup = plan.ends, prompts.tokenizer.markup_ids
    marks = [(ends[at - 1] if at else 0, ends[at]) for at, t in enumerate(plan.ids) if t in markup]
    return plan, replace(made, said=place(made.spoken, plan.text, marks), spoken=())


def said_after(
    before: SaidMessages | None,
    made: DirectedRequest,
    text: bytes,
    answer: bytes,
    shown: ShownAnswer,
) -> SaidMessages | None:
    """Return where messages are once a prompt `text` had its answer; `before` it others were."""
    request, said = made.request, made.said
    if request.resume is not None:
        if before is None or request.extends or not made.spoken:
            return before
        said = SaidMessages(before.messages[: len(made.spoken)])  # less the answer as it was begun
    elif request.extends:
        return before.edited(edits_of(made.matched)) if before is not None else None
    if said is None or not answer:
        return said.within(len(text)) if said is not None else None
    if request.continues:  # what its client sends is that message with its rest
        sent = len(made.spoken) or len(said.messages)
        return SaidMessages(said.messages[: sent - 1])
    found = place([_spoken(shown)], answer, ()).messages[0]
    start = None if found.start is None else len(text) + found.start
    return SaidMessages((*said.messages, replace(found, start=start)))


def _spoken(shown: ShownAnswer) -> Spoken:
    said = shown.message
    return Spoken(said.role, said_digest(said), len(shown.text), shown.text)


def parts_after(
    before: tuple[OtherParts, ...] | None, made: DirectedRequest, answer: bytes, shown: ShownAnswer
) -> tuple[OtherParts, ...] | None:
    """Return what messages have besides their texts once a prompt had its answer; None: unknown."""
    request = made.request
    if request.resume is not None:
        if before is None or request.extends or not made.spoken:
            return before
        count = len(made.spoken)
        known = tuple(each for each in before if each.number < count)
    elif request.extends or made.parts is None or made.said is None:
        return None  # what was appended is in no message that is numbered
    else:
        known, count = made.parts, len(made.said.messages)
    if not answer or request.continues:
        return known
    found = other_parts(count, shown.message, shown.message)
    return (*known, found) if found is not None else known
