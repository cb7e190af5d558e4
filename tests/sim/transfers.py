"""The data plane without sockets: the real offer book decides, the simulated network carries."""

from fabric.control import Address, LinkKind
from fabric.errors import RetryLaterError, UnauthorizedError
from fabric.limits import TRANSFER_TIMEOUT_S
from node.offers import OfferBook
from node.transfer_client import TransferReport

PORT = 7_000
BYTES_PER_S = 20e6


class SimTransfers:
    """What a Node asks of its TransferServer."""

    def __init__(self, name, cluster_key, clock):
        self.book = OfferBook(name, cluster_key, clock)
        self._addresses = (Address(name, PORT, LinkKind.ETHERNET),)

    def addresses(self):
        return self._addresses

    def offer(self, *arguments):
        return self.book.add(*arguments)

    def withdraw(self, migration):
        self.book.withdraw(migration)

    def offered_agents(self):
        return self.book.agents()

    def counts(self):
        return {}


def fetch_from(world):
    """Return what stands for `fetch_blocks`: all blocks, or some and an error."""

    def fetch(addresses, *, name, source, ticket, refs, allocate, done, **_):
        loop, network = world.loop, world.network
        peer = world.nodes[source]
        reaches = not (network.is_cut(name, source) or network.is_cut(source, name))
        if not reaches or peer.process.is_frozen or peer.node is None:
            loop.extra_s += TRANSFER_TIMEOUT_S
            raise _broken(source)
        offered = peer.node.transfers.book.check(ticket, name)
        sent_bytes = 0
        for ref in refs:
            if ref.name not in offered:
                message = "the ticket does not cover that block"
                raise UnauthorizedError(message, code="not_offered")
            if network.random.random() < network.weather.loss_odds:
                loop.extra_s += TRANSFER_TIMEOUT_S
                raise _broken(source)
            payload = peer.node.store.blocks.read_payload(ref)
            view = allocate(ref)
            view[:] = payload
            done(ref, view)
            sent_bytes += len(view)
        loop.extra_s += sent_bytes / BYTES_PER_S + network.delay_s()
        return TransferReport(len(refs), sent_bytes, loop.extra_s, 1, 0, sent_bytes)

    return fetch


def _broken(source):
    return RetryLaterError(f"{source} sends nothing over any of its addresses")
