"""The fabric's own API as clients reach it: its real routes, in the simulated router's process."""

import asyncio
import json

from starlette.requests import Request

from fabric.errors import RejectedError
from router.admin.agent_settings import AgentSettingsApi
from router.admin.directives import DirectivesApi
from router.http.forwarded import Principal
from tests.sim.router_requests import RouterRequests

ATTEMPTS = 40
# Edits that cannot be placed in the record of a node.
PLACING_CODES = frozenset(
    {
        "attention_sink", "message_edited", "no_messages", "out_of_range", "overlapping_spans",
        "span_cuts_template", "text_ambiguous", "text_not_found",
    }
)  # fmt: skip

# Likewise, after a concurrent turn edited the named message, or after the agent continued from an
# earlier record when its node died.
GONE_CODES = frozenset({"call_not_found", "message_not_found", "nothing_to_edit"})


class Api:
    """API calls, repeated unchanged until their outcome is clear."""

    def __init__(self, world):
        self._world = world
        self._ask = RouterRequests(world).in_router

    async def repeat_call(self, talk, random, verb, body=None, *, is_concurrent=False, **path):
        """Repeat a call until it is done or rejected; if `is_concurrent`, turns continue.

        Return the reply, or None; and whether it is certain that nothing was changed.
        """
        is_certain = True
        allowed = {"invalid_value"} if verb == "evict" else PLACING_CODES
        for attempt in range(ATTEMPTS):
            if is_concurrent or attempt:
                allowed = allowed | GONE_CODES
            done = await self._ask(
                f"{talk.name}: {verb} {path or ''}",
                lambda services: _called(services, talk.key, verb, body, path),
                allowed=allowed,
            )
            if done.is_over and done.error is None:
                return done.result, False
            if isinstance(done.error, RejectedError) and done.error.code != "nothing_saved":
                return None, is_certain
            is_certain &= done.error is not None and done.error.code == "nothing_saved"
            await asyncio.sleep(0.5 + random.random())
        return None, is_certain


async def _called(services, key, verb, body, path):
    kind = DirectivesApi if hasattr(DirectivesApi, verb) else AgentSettingsApi
    api = kind(services.fleet, services.propagation, services.fleet.clock)
    response = await getattr(api, verb)(_request(key, body, path))
    return json.loads(response.body)


def _request(key, body, path):
    tenant, agent = key
    raw = b"" if body is None else json.dumps(body).encode()

    async def receive():
        return {"type": "http.request", "body": raw, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path_params": {"agent": agent, **path},
        "headers": [],
        "macfabric.caller": Principal(tenant),
    }
    return Request(scope, receive)
