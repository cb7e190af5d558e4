"""Messages between processes: delayed, lost, doubled, reordered, cut off in one direction.

`post` is a datagram (a control call or its reply); a `Pipe` is one direction of a connection,
in order and complete for as long as the connection lives.
"""

import asyncio
from contextvars import copy_context
from dataclasses import dataclass, field

RETRANSMIT_S = 0.2
LOSS_NOTICED_S = 5.0


@dataclass
class Weather:
    """Delays, losses and duplicates of the network."""

    base_s: float = 0.001
    jitter_s: float = 0.002
    late_odds: float = 0.0
    late_s: float = 0.0
    loss_odds: float = 0.0
    double_odds: float = 0.0


@dataclass(eq=False)
class Network:
    """Links between hosts, by name: which are cut, and how fast the others are."""

    loop: object
    random: object
    weather: Weather = field(default_factory=Weather)
    cuts: dict = field(default_factory=dict)  # (from, to): number of faults that cut it
    context: object = field(default_factory=copy_context)  # of no process

    def cut(self, source, target, change=1):
        """Count one more, or with -1 one fewer, reason for a direction to be cut."""
        self.cuts[source, target] = self.cuts.get((source, target), 0) + change

    def is_cut(self, source, target):
        return self.cuts.get((source, target), 0) > 0

    def schedule(self, delay_s, work, *arguments):
        """Schedule work of the network itself, which runs even if hosts are dead by then."""
        self.loop.call_later(delay_s, work, *arguments, context=self.context)

    @property
    def is_bad(self):
        """Whether messages may be delayed, duplicated or lost."""
        weather = self.weather
        return bool(weather.late_odds or weather.loss_odds or weather.double_odds)

    def delay_s(self):
        weather = self.weather
        delay_s = weather.base_s + weather.jitter_s * self.random.random()
        if self.random.random() < weather.late_odds:
            delay_s += weather.late_s * self.random.random()
        return delay_s

    def post(self, source, target, deliver, lose):
        """Deliver a message at least once, or lose it and call `lose` when that is noticed.

        A message that meets a cut arrives after it, however late: connections outlive short cuts.
        """
        if self.random.random() < self.weather.loss_odds:
            self.schedule(LOSS_NOTICED_S * self.random.random(), lose)
            return
        for _ in range(1 + (self.random.random() < self.weather.double_odds)):
            self.schedule(self.delay_s(), self._arrive, source, target, deliver)

    def _arrive(self, source, target, deliver):
        if self.is_cut(source, target):
            self.schedule(RETRANSMIT_S, self._arrive, source, target, deliver)
        else:
            deliver()


class Pipe:
    """A direction of a connection: chunks arrive in order, or the pipe breaks."""

    def __init__(self, network, source, target):
        self._network = network
        self._ends = (source, target)
        self._due_s = 0.0
        self._underway = []
        self.arrived = []  # chunks; b"" is the end
        self.is_broken = False
        self._error = ConnectionResetError()
        self._news = asyncio.Event()

    def put(self, chunk):
        loop = self._network.loop
        self._due_s = max(self._due_s, loop.time() + self._network.delay_s())
        self._underway.append(chunk)
        self._network.schedule(self._due_s - loop.time(), self._arrive)

    def break_off(self):
        """Break once the other end can notice; chunks under way are lost."""
        self._underway.clear()
        self._schedule(self._break)

    def _schedule(self, work):
        if self._network.is_cut(*self._ends):
            self._network.schedule(RETRANSMIT_S, self._schedule, work)
        else:
            self._network.schedule(self._network.delay_s(), work)

    def _break(self):
        self.is_broken = True
        self._news.set()

    def fail(self, error):
        """Raise an error to the reader, who waits."""
        self._error = error
        self._break()

    def _arrive(self):
        if self._network.is_cut(*self._ends):
            self._network.schedule(RETRANSMIT_S, self._arrive)
        elif self._underway and not self.is_broken:
            self.arrived.append(self._underway.pop(0))
            self._news.set()

    async def take(self):
        """Return the next chunk, b"" at the end; raise ConnectionResetError where it broke."""
        while not self.arrived:
            if self.is_broken:
                raise self._error
            self._news.clear()
            await self._news.wait()
        chunk = self.arrived[0]
        if chunk:
            self.arrived.pop(0)
        return chunk
