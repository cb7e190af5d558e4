"""A turn's prompt as text: what its client left out is put back, then directives replace parts."""

from dataclasses import dataclass

from fabric.record.directive import Directive
from fabric.turn.prompt_limit import PromptLimit
from node.dialect.folding import Rendered
from node.mlx.answer import Answer
from node.turn.directed import Directed, direct
from node.turn.restored import Located, PutBack, ShownAnswer, put_back
from node.turn.turn_parts import TurnParts


@dataclass(frozen=True, slots=True)
class SpelledTurn:
    """What a turn is rendered from, and the answer to it, which is begun."""

    restored: PutBack
    directed: Directed
    rendered: Rendered
    answer: Answer


async def spell_turn(
    parts: TurnParts,
    found: Located,
    directives: tuple[Directive, ...],
    limit: PromptLimit,
    shown: ShownAnswer,
) -> SpelledTurn:
    """Spell a turn as these directives have it; raise RejectedError where that is no prompt."""
    known = parts.claims.answers(found.request, found.wanted)
    salt = parts.prefixes.store.salt(found.request.tenant)

    def spelled() -> SpelledTurn:
        restored = put_back(found, known)
        directed = direct(restored.request, directives, restored.note, salt, found.request.messages)
        rendered = parts.prompts.render(directed.request, limit)
        answer = parts.sequences.begin_answer(directed.request, rendered.text, shown)
        return SpelledTurn(restored, directed, rendered, answer)

    return await parts.prompts.encoders.run(spelled)
