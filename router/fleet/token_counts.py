"""How many tokens a prompt has: any node that serves the model can say."""

from functools import partial

import aiohttp

from fabric.codec import dump_json, from_plain, parse_json
from fabric.errors import FabricError, RejectedError, RetryLaterError
from fabric.ids import NodeName
from fabric.limits import FRAME_BYTES_MAX
from fabric.turn.generation import COUNT_PATH, GenerateRequest, TokenCount
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLostError
from router.large_work import run_sized
from router.turn_request import TurnRequest


class TokenCounts:
    """Asks nodes, one after the other until one answers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def count(self, turn: TurnRequest) -> int:
        """Return the tokens of a turn's prompt; raise RejectedError where it is none."""
        fleet, asked = self._fleet, turn.request(epoch=0)
        for member in fleet.membership.members:
            serves = member.view is not None and member.view.model == turn.model
            if serves and fleet.is_alive(member.name):
                try:
                    return await self._ask(member.name, asked, turn.prompt.bytes_count)
                except NodeLostError:
                    continue
        message = "no node that serves the model answers"
        raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")

    async def _ask(self, node: NodeName, asked: GenerateRequest, size_bytes: int) -> int:
        link = self._fleet.link(node)
        body = await run_sized(asked.tenant, size_bytes, partial(dump_json, asked))
        answer = await link.post(COUNT_PATH, body, {"content-type": "application/json"})
        try:
            raw = await answer.content.read(FRAME_BYTES_MAX)
            count: TokenCount = from_plain(TokenCount, parse_json(raw), "count")
        except (aiohttp.ClientError, OSError) as error:
            text = f"the connection to {node} broke ({type(error).__name__})"
            raise NodeLostError(text) from None
        except RejectedError as error:
            text = f"{node} counted wrongly: {error.message}"
            raise FabricError(text, code="bad_node_answer") from None
        finally:
            answer.close()
        return count.tokens
