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
# What cannot be placed in the record that a node has.
PLACING_CODES = frozenset(
    {
        "attention_sink", "message_edited", "no_messages", "out_of_range", "overlapping_spans",
        "span_cuts_template", "text_ambiguous", "text_not_found",
    }
)  # fmt: skip

# Likewise, where a turn that the client sent meanwhile edited what is named, or where the agent
# went on with an earlier record after its node's death.
GONE_CODES = frozenset({"call_not_found", "message_not_found", "nothing_to_edit"})


class Api:
    """Calls that are repeated with the same words until it is clear what came of them."""

    def __init__(self, world):
        self._world = world
        self._ask = RouterRequests(world).in_router

    async def insist(self, talk, random, verb, body=None, *, is_aside=False, **path):
        """Ask until it is done or refused; `is_aside` says that turns continue meanwhile.

        Return the answer, or None; and whether it is certain that nothing was done.
        """
        is_certain = True
        allowed = {"invalid_value"} if verb == "evict" else PLACING_CODES
        for attempt in range(ATTEMPTS):
            if is_aside or attempt:
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
