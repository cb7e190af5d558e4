"""The data plane without sockets: the real offer book decides, the simulated network carries."""

import asyncio

from fabric.errors import RetryLaterError, UnauthorizedError
from fabric.net.links import Address, LinkKind
from node.limits import HEAD_REPLY_S, TRANSFER_TIMEOUT_S
from node.transfer.client import TransferReport
from node.transfer.offer_book import OfferBook
from tests.sim.workers import Worker, atomic

PORT = 7_000
BYTES_PER_S, SLOW_BYTES_PER_S = 20e6, 2e3


class SimTransfers:
    """The part of TransferServer that a Node uses."""

    def __init__(self, name, cluster_key, clock):
        self.offers = OfferBook(name, cluster_key, clock)
        self._addresses = (Address(name, PORT, LinkKind.ETHERNET),)

    def addresses(self):
        return self._addresses

    def counts(self):
        return {}


def fetch_from(world):
    """Return a simulated `fetch_blocks`, which delivers all blocks, or some and an error."""

    bytes_per_s = SLOW_BYTES_PER_S if world.has_slow_links else BYTES_PER_S

    def reaches(name, peer):
        network = world.network
        is_cut = network.is_cut(name, peer.name) or network.is_cut(peer.name, name)
        return not (is_cut or peer.process.is_frozen or peer.node is None)

    def fetch(addresses, *, name, source, ticket, refs, allocate, done, **_):
        network, peer = world.network, world.nodes[source]
        if not reaches(name, peer):
            spend(world.loop, TRANSFER_TIMEOUT_S)
            raise _broken(source)
        offered = peer.node.resources.transfers.offers.check(ticket, name)
        sent_bytes, spent_s = 0, 0.0
        for ref in refs:
            if ref.name not in offered.refs:
                message = "the ticket does not cover that block"
                raise UnauthorizedError(message, code="not_offered")
            is_lost = network.random.random() < network.weather.loss_odds
            if is_lost or not reaches(name, peer):
                spend(world.loop, TRANSFER_TIMEOUT_S)
                raise _broken(source)
            with atomic():  # the peer's work is no step of this process
                payload = memoryview(bytearray(ref.payload_bytes))
                peer.node.resources.store.blocks.open_payload(ref).read_into(payload, 0)
            view = allocate(ref)
            view[:] = payload
            step_s = len(view) / bytes_per_s + network.delay_s()
            spend(world.loop, step_s)
            done(ref, view)
            sent_bytes += len(view)
            spent_s += step_s
        return TransferReport(len(refs), sent_bytes, spent_s, 1, 0, sent_bytes)

    return fetch


def ask_from(world, name):
    """Return a function by which a node calls others over the simulated network.

    A duplicated call is answered twice, which changes nothing.
    """

    async def ask(source, _addresses, raw, wait_s):
        network, host = world.network, world.nodes[source]
        answered = asyncio.get_running_loop().create_future()

        def settle(reply):
            if not answered.done():
                answered.set_result(reply)

        def fail():
            if not answered.done():
                answered.set_exception(_broken(source))

        def reply_with(reply):
            network.post(source, name, lambda: settle(reply), fail)

        def arrive():
            host.receive(raw, once(reply_with), fail, name)

        network.post(name, source, arrive, fail)
        return await asyncio.wait_for(answered, wait_s + HEAD_REPLY_S)

    return ask


def once(reply):
    """Return a distinct function, by which a node identifies an unanswered call."""
    return lambda data: reply(data)  # noqa: PLW0108


def spend(loop, seconds):
    """Spend simulated time in a worker's call."""
    if Worker.running is not None:
        Worker.running.pause(seconds)
    else:
        loop.extra_s += seconds


def _broken(source):
    return RetryLaterError(f"{source} sends nothing over any of its addresses")
