"""A node without a model: real HTTP and real control messages, an echo for an engine.

Its memory is the list of messages or the prompt text, counted in characters instead of tokens,
so that every claim about reuse, ownership and epochs can be checked.
"""

import asyncio
import time
from collections import Counter
from dataclasses import replace

from aiohttp import web

from fabric.codec import from_plain, parse_json
from fabric.control.calls import (
    CONTROL_PATH,
    NODE_HEADER,
    ErrorReply,
    decode_call,
    encode_reply,
    spec_of,
)
from fabric.control.node_calls import LastMatch
from fabric.control.term_calls import Ballot
from fabric.errors import (
    FabricError,
    RejectedError,
    RetryElsewhereError,
    RetryLaterError,
    StaleEpochError,
)
from fabric.keys import http_secret
from fabric.record.manifest import OwnerState
from fabric.record.tombstone import Tombstones
from fabric.record.turn_history import TurnNote, append_turn
from fabric.turn.generation import (
    CLUSTER_HEADER,
    GENERATE_PATH,
    Admitted,
    CacheTier,
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    HandedOver,
    IdentityKind,
    Resumption,
    TurnTimes,
    encode_event,
)
from router.fleet.node_client import NodeLostError
from tests.router.fake_control import FakeControl
from tests.router.fake_memory import Behaviour, Memory, block_names, match, prompt_text

CLUSTER_KEY = b"k" * 32
MODEL = "echo"


class FakeNode(FakeControl):
    def __init__(self, name, *, model=MODEL, incarnation=1, copy_s=0.0, tls=None):
        self.name = name
        self.model = model
        self.incarnation = incarnation
        self.behaviour = Behaviour()
        self.memory: dict[tuple, Memory] = {}
        self.blocks: set[str] = set()
        self.requests: list[GenerateRequest] = []
        self.calls: Counter[str] = Counter()
        self.http_calls: list[str] = []  # the calls that arrived over HTTP
        self.opened: list[int] = []  # ports of connections opened ahead
        self.ports: dict[str, int] = {}  # request kind: port of its last connection
        self.cancelled = 0
        self.finished = 0
        self.running = 0
        self.changes = 0
        self.view_changes: dict = {}
        self.is_down = False
        self.is_loading = False
        self.erased = Tombstones()
        self.ballot = Ballot()
        self.terms: list[int | None] = []  # of the accepted turns and changing calls
        self.cluster_key = CLUSTER_KEY
        self.http_url = ""
        self.aborted: set[str] = set()
        self.more_routes: dict = {}  # path: handler
        self.after: dict = {}  # control call: hook before its reply
        self.at_opening = _nothing  # hook before the reply on a connection opened ahead
        self._runner = None
        self._copy_s = copy_s
        self._tls = tls
        self._handlers = self.handlers()

    async def start(self, port=0):
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post(GENERATE_PATH, self._generate)
        app.router.add_post(CONTROL_PATH, self._http_control)
        app.router.add_head(CONTROL_PATH, self._opened)
        for path, answer in self.more_routes.items():
            app.router.add_post(path, answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=self._tls)
        await site.start()
        port = self._runner.addresses[0][1]
        scheme = "http" if self._tls is None else "https"
        self.http_url = f"{scheme}://127.0.0.1:{port}"
        self.is_down = False

    async def stop(self):
        """Kill the node: connections break, control calls fail."""
        self.is_down = True
        if self._runner is not None:
            for server in self._runner.server.connections:
                if server.transport is not None:
                    server.transport.abort()
            await self._runner.cleanup()
            self._runner = None

    async def restart(self):
        await self.stop()
        self.incarnation += 1
        self.changes = 0
        for memory in self.memory.values():
            memory.hot = False
        await self.start()

    # --- control -----------------------------------------------------------------------------

    async def _http_control(self, request):
        assert request.headers[CLUSTER_HEADER] == http_secret(self.cluster_key)
        assert request.headers[NODE_HEADER] == self.name
        raw = await request.read()
        self.http_calls.append(spec_of(type(decode_call(raw)[0])).name)
        self.ports[self.http_calls[-1]] = _port(request)
        try:
            return web.Response(body=await self(raw))
        except NodeLostError:
            request.transport.abort()
            raise

    async def _opened(self, request):
        assert request.headers[CLUSTER_HEADER] == http_secret(self.cluster_key)
        assert request.headers[NODE_HEADER] == self.name
        self.opened.append(_port(request))
        await self.at_opening(request)
        return web.Response(status=204)

    async def __call__(self, raw):
        call, origin = decode_call(raw)
        name = spec_of(type(call)).name
        if self.is_loading:
            wait = ErrorReply(503, "loading", "the model is loading", 0.5)
            return encode_reply(wait)
        if self.is_down:
            message = f"the actor of {self.name} is dead"
            raise NodeLostError(message, self.name)
        self.calls[name] += 1
        if self.behaviour.hang or name in self.behaviour.dropped_calls:
            await asyncio.sleep(3600)
        await asyncio.sleep(self.behaviour.slow.get(name, 0.0))
        try:
            if name in self.behaviour.fail:
                raise self.behaviour.fail[name]
            if type(call) not in self._handlers:  # as a node of an earlier version
                message = "unknown control call"
                raise RejectedError(message, code="unknown_call")
            if not spec_of(type(call)).is_open:
                self.ballot.check(origin.term, time.monotonic())
                self.terms.append(origin.term)
            reply = self._handlers[type(call)](call)
            if asyncio.iscoroutine(reply):
                reply = await reply
            if name in self.after:
                await self.after[name]()
        except FabricError as error:
            wait = getattr(error, "retry_after_s", None)
            reply = ErrorReply(int(error.status), error.code, error.message, wait, error.param)
        if name in self.behaviour.lost_replies or self.is_down:
            message = "the answer was lost"
            raise NodeLostError(message, self.name)
        return encode_reply(reply)

    # --- turns -------------------------------------------------------------------------------

    async def _generate(self, request):
        if request.headers.get(CLUSTER_HEADER) != http_secret(CLUSTER_KEY):
            return _error(401, "invalid_api_key", "wrong secret")
        turn = from_plain(GenerateRequest, parse_json(await request.read()), "request")
        self.requests.append(turn)
        self.ports["turn"] = _port(request)
        if self.behaviour.hang:
            await asyncio.sleep(3600)
        if self.behaviour.raw_answer is not None:
            status, body = self.behaviour.raw_answer
            return web.Response(status=status, body=body)
        await asyncio.sleep(self.behaviour.first_delay_s)
        try:
            if self.behaviour.refuse is not None:
                raise self.behaviour.refuse
            self.ballot.check(turn.term, time.monotonic())
            self.terms.append(turn.term)
            await self._wait_for_move(turn)
            memory = self._claim(turn)
        except FabricError as error:
            wait = getattr(error, "retry_after_s", None)
            return _error(int(error.status), error.code, error.message, error.param, wait)
        return await self._stream(request, turn, memory)

    async def _wait_for_move(self, turn):
        """Wait until the move of a turn that was sent ahead has brought its agent."""
        key = turn.tenant, turn.identity.agent
        while turn.after and turn.after not in self.aborted:
            if key in self.memory and self.memory[key].epoch >= turn.epoch:
                return
            await asyncio.sleep(0.005)
        if turn.after:
            message = "the move failed"
            raise RetryElsewhereError(message)

    def _claim(self, turn):
        text = prompt_text(turn)
        if not turn.is_kept:
            return Memory(turn.tenant, "unlisted", 1)
        if turn.identity.kind is IdentityKind.AGENT:
            return self._claim_agent(turn, (turn.tenant, turn.identity.agent))
        group = turn.identity.agent
        for memory in self.memory.values():
            if (
                memory.state is OwnerState.OWNED
                and memory.tenant == turn.tenant
                and memory.text
                and text.startswith(memory.text)
                and (group is None or memory.group == group)
            ):
                return memory
        # As in a real node: never a group's bare name, which other nodes would assign, too.
        lead = f"{group}~" if group else "auto-"
        name = f"{lead}{self.name}-{len(self.memory)}"
        while (turn.tenant, name) in self.memory:
            name += "+"
        return self._new(turn.tenant, name, self.floor((turn.tenant, name)) + 1, group)

    def _claim_agent(self, turn, key):
        memory = self.memory.get(key)
        if memory is None:
            floor = self.floor(key)
            if 0 < turn.epoch <= floor:
                message = f"epoch {turn.epoch} was erased"
                raise StaleEpochError(message, code="erased")
            return self._new(*key, turn.epoch or floor + 1, None)
        if memory.state is OwnerState.SEALED:
            message = "the agent is being moved"
            raise RetryLaterError(message, code="migrating")
        if memory.state is OwnerState.REPLICA and turn.epoch <= memory.epoch:
            message = "the agent is owned elsewhere"
            raise RetryElsewhereError(message)
        if 0 < turn.epoch < memory.epoch:
            message = f"epoch {turn.epoch} was superseded"
            raise StaleEpochError(message)
        if turn.epoch > memory.epoch:
            memory.epoch, memory.state, memory.owner = turn.epoch, OwnerState.OWNED, None
        return memory

    def _new(self, tenant, agent, epoch, group):
        self.refuse_new()
        memory = Memory(tenant, agent, epoch, group=group)
        self.memory[memory.key] = memory
        self.changes += 1
        return memory

    async def _stream(self, request, turn, memory):
        text = prompt_text(turn)
        kind, cached = match(memory.text, text)
        reason = f"{cached} characters in common"
        memory.last_match = LastMatch(kind, cached, len(text), reason)
        tier = CacheTier.COLD if not cached else CacheTier.HOT if memory.hot else CacheTier.DISK
        admitted = Admitted(
            memory.agent,
            self.name,
            memory.epoch,
            tier,
            kind,
            len(text),
            cached,
            reason,
            amortized_tokens=self.behaviour.amortized_tokens,
        )
        events = [admitted, *self._answer(turn, text)]
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        await response.prepare(request)
        memory.busy += 1
        self.running += 1
        try:
            for count, event in enumerate(events):
                if self.behaviour.break_after == count:
                    request.transport.abort()
                    return response
                if isinstance(event, Finished) and turn.is_kept:
                    self._remember(memory, turn, text, admitted, event)
                if isinstance(event, Finished) and turn.turn is not None:
                    event = replace(event, times=times_of(turn))  # noqa: PLW2901
                elif count and memory.seal is not None:
                    ids = (1,) * (event.index if isinstance(event, Delta) else 0)
                    resume = Resumption(ids, sampled=1, top=(), seed=0)
                    event = HandedOver(resume, times_of(turn))  # noqa: PLW2901
                    self.seal_now(memory, memory.seal)
                raw = event if isinstance(event, bytes) else encode_event(event)
                await response.write(raw)
                if isinstance(event, HandedOver):
                    return response
                await asyncio.sleep(self.behaviour.delay_s)
            self.finished += 1
        except (ConnectionError, asyncio.CancelledError):
            self.cancelled += 1
            raise
        finally:
            memory.busy -= 1
            self.running -= 1
        return response

    def _remember(self, memory, turn, text, admitted, finished):
        if turn.turn is not None:
            note = TurnNote(
                turn.turn.id, turn.turn.began_s, self.name, "stop", admitted.cache.value,
                admitted.match.value, admitted.match_reason, admitted.prompt_tokens,
                admitted.cached_tokens, 0, finished.completion_tokens, times_of(turn),
            )  # fmt: skip
            memory.turns = append_turn(memory.turns, note)
        memory.text, memory.sketch, memory.hot = text, turn.sketch, True
        memory.revision += 1
        self.blocks |= block_names(text)
        self.changes += 1

    def _answer(self, turn, text):
        if self.behaviour.events is not None:
            return self.behaviour.events
        words = text.split()[-turn.sampling.max_tokens :]
        resumed_count = len(turn.resume.answer_ids) if turn.resume is not None else 0
        deltas = [Delta(i, word + " ") for i, word in enumerate(words)]
        return [*deltas[resumed_count:], Finished(FinishReason.STOP, len(deltas))]


def times_of(turn):
    """Return a fake node's times: the router's own, and recognizable constants."""
    if turn.turn is None:
        return None
    tag = turn.turn
    return TurnTimes(tag.queue_s, tag.move_s, 0.25, 0.0, 0.5, 1.0, 2.0, 0.125, 1.75)


def _error(status, code, message, param=None, retry_after_s=None):
    body = {"code": code, "message": message, "param": param, "status": status}
    if retry_after_s is not None:
        body["retry_after_s"] = retry_after_s
    return web.json_response({"error": body}, status=status)


def _port(request):
    return request.transport.get_extra_info("peername")[1]


async def _nothing(_request):
    pass
