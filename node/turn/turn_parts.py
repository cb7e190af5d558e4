"""What all turns of a node are served with, step by step."""

from dataclasses import dataclass

from node.engine.engine_thread import EngineThread
from node.runtime.health import Health
from node.runtime.live_turns import LiveTurns
from node.turn.claim import Claims
from node.turn.grammars import Grammars
from node.turn.prefix import Prefixes
from node.turn.request_prompt import Prompts
from node.turn.saver import Savers
from node.turn.turn_sequence import Sequences


@dataclass(frozen=True, slots=True)
class TurnParts:
    """The parts of a node that every turn uses."""

    prompts: Prompts
    grammars: Grammars
    claims: Claims
    prefixes: Prefixes
    sequences: Sequences
    savers: Savers
    engine: EngineThread
    live: LiveTurns
    health: Health
