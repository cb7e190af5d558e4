"""What the router asks a node about one prompt, apart from its turn: nothing is computed there."""

from functools import partial
from typing import TypeVar

import aiohttp

from fabric.codec import dump_json, from_plain, parse_json
from fabric.errors import FabricError, RejectedError
from fabric.ids import NodeName
from fabric.limits import TURN_BODY_BYTES_MAX, TURN_ITEMS_MAX
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLostError
from router.large_work import run_sized
from router.turn_request import TurnRequest

T = TypeVar("T")


async def ask_about_prompt(
    fleet: Fleet, node: NodeName, path: str, turn: TurnRequest, kind: type[T]
) -> T:
    """Return a node's answer; raise its FabricError, or NodeLostError where none comes."""
    asked = turn.request(epoch=0)
    body = await run_sized(turn.tenant, turn.prompt.bytes_count, partial(dump_json, asked))
    answer = await fleet.link(node).post(path, body, {"content-type": "application/json"})
    raw = bytearray()
    try:
        async for chunk in answer.content.iter_any():
            raw += chunk
            if len(raw) > TURN_BODY_BYTES_MAX:
                text = f"{node} answered with more than a prompt may be"
                raise FabricError(text, code="bad_node_answer")
    except (aiohttp.ClientError, OSError) as error:
        text = f"the connection to {node} broke ({type(error).__name__})"
        raise NodeLostError(text, node) from None
    finally:
        answer.close()
    try:
        told: T = from_plain(kind, parse_json(bytes(raw), items_max=TURN_ITEMS_MAX), "answer")
    except RejectedError as error:
        text = f"{node} answered wrongly about a prompt: {error.message}"
        raise FabricError(text, code="bad_node_answer") from None
    return told
