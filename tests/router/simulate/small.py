"""Small fleets, runs and single nodes for tests of the simulator."""

from router.simulate.catalog import WORKLOADS
from router.simulate.content import ContentChain, Extent, segment
from router.simulate.engine import NodeTurn
from router.simulate.fleet_file import FleetModel, NodeModel
from router.simulate.machine import Machine
from router.simulate.run import SimulatedRun
from router.simulate.timeline import Timeline
from router.simulate.workload import Scale, capacity_per_s, work_of

GIB = 1 << 30
FAST_DECODE = 1e9  # tokens per second: answers take no time


def node(name="one", **changes):
    plain = {
        "prefill_tokens_per_s": 512.0,
        "decode_tokens_per_s": 50.0,
        "context_half_tokens": 1 << 60,
        "hot_bytes": 16 * GIB,
    }
    return NodeModel(name=name, **(plain | changes))


def fleet(*nodes, **changes):
    return FleetModel(name="small", nodes=nodes or (node(),), **changes)


THREE = fleet(
    node("slow", prefill_tokens_per_s=300.0, decode_tokens_per_s=30.0),
    node("fast", prefill_tokens_per_s=1200.0, decode_tokens_per_s=70.0),
    node("middle", prefill_tokens_per_s=800.0, decode_tokens_per_s=50.0),
)


def workload_run(name, policy="seconds", *, sessions=20, load=0.75, seed=1, on=THREE, **more):
    workload, scale = WORKLOADS[name], Scale.of(on)
    per_s = load * capacity_per_s(on, work_of(workload, scale, sessions))
    return SimulatedRun(on, policy, seed, workload.arrivals(seed, scale, sessions, per_s), **more)


def prompt(*parts):
    """Build a prompt of (number, tokens) messages."""
    content = ContentChain()
    content.extend((segment(number), tokens) for number, tokens in parts)
    return Extent.of(content)


class OneNode:
    """A machine without any router; turns are started at given times."""

    def __init__(self, model=None, **changes):
        self.timeline = Timeline()
        of_one = model or node()
        self.machine = Machine(self.timeline, of_one, fleet(of_one, **changes))
        self.first_s, self.end_s, self.lost = {}, {}, []

    def ask(self, at_s, agent, extent, answer_tokens=1):
        def start():
            job = NodeTurn(
                agent,
                extent,
                answer_tokens,
                epoch=1,
                sketch=(1,),
                on_first=lambda: self.first_s.setdefault(agent, self.timeline.now_s - at_s),
                on_end=lambda: self.end_s.setdefault(agent, self.timeline.now_s - at_s),
                on_lost=lambda: self.lost.append(agent),
            )
            self.machine.start(job)

        self.timeline.at(at_s, start)

    def run(self):
        self.timeline.run()
        return self
