"""Judge of the bytes on disk, independent of what the nodes report.

Records are decoded as they are written. No two disks may claim an agent at one epoch, acknowledged
turns must be stored, and erased words must be gone.
"""

from fabric.errors import CorruptDataError
from fabric.kvcache.hashing import agent_digest, token_bytes
from fabric.record.manifest import OwnerState, decode_manifest
from fabric.record.provenance import TruncatedBy
from tests.sim.disk import Changes
from tests.sim.model import END
from tests.sim.node_host import CLUSTER_KEY, TOMBSTONES
from tests.sim.router_host import ROUTER

_RECORDS = "manifests/"
WELL_S = 15.0  # after so long without trouble all nodes have learned all owners


class DiskJudge:
    """The current records of all simulated disks."""

    def __init__(self, world):
        self._world = world
        self._known = {}  # (node, file): (bytes, record)
        self.owned = set()  # (agent, epoch): some disk claimed it
        self.moved = set()  # (agent, epoch): began with a move, after all earlier turns
        self._seen = None

    def records(self, name):
        """Return a disk's sound records by agent."""
        self._refresh()
        found = [r for (node, _), (_, r) in self._known.items() if node == name and r is not None]
        return {record.key: record for record in found}

    def check_step(self):
        """Compare all owners if any disk has changed."""
        if self._refresh():
            self._check_owners()

    def _refresh(self):
        if self._seen == Changes.count:
            return False
        self._seen = Changes.count
        known = {}
        for name, host in self._world.nodes.items():
            for file, raw in host.drive.files.items():
                if file.startswith(_RECORDS):
                    old = self._known.get((name, file))
                    is_same = old is not None and old[0] is raw
                    known[name, file] = old if is_same else (raw, self._decoded(raw))
        has_changed = known != self._known
        self._known = known
        return has_changed

    def _decoded(self, raw):
        try:
            record = decode_manifest(raw)
        except CorruptDataError:
            return None
        if record.state is OwnerState.OWNED:
            self._world.watch.on_host(record.key, record.owner)
            self.owned.add((record.key, record.epoch))
            if record.migration is not None:
                self.moved.add((record.key, record.epoch))
        return record

    def _check_owners(self):
        claims = {}
        for (name, _), (_, record) in self._known.items():
            if record is None or record.tenant.startswith("_"):
                continue
            if record.state is OwnerState.REPLICA or record.owner != name:
                continue
            key = record.key
            other = claims.setdefault((key, record.epoch), name)
            if other != name:
                self._world.fail(
                    f"the disks of {other} and {name} both claim {key} at epoch {record.epoch}"
                )

    # --- acknowledged ------------------------------------------------------------------------

    def check_acknowledged(self, talk, key, texts, epoch):
        """Check that some disk holds an acknowledged turn, and that none has a later owner.

        The turn's text is one of `texts`.
        """
        self._check_superseded(talk, key, epoch)
        expected = {text.rstrip(chr(END)) for text in texts}
        for name in self._world.nodes:
            record = self.records(name).get(key)
            if record is not None and record.text.rstrip(chr(END)) in expected:
                return
            if record is not None and record.provenance.truncated_by is TruncatedBy.FSCK:
                return  # a drive lost blocks meanwhile: other judges check that
        if not self._world.watch.evicted[key]:
            self._world.fail(f"{talk.name}: acknowledged as durable, but on no disk")

    def _check_superseded(self, talk, key, epoch):
        """Check that no disk has a later claim, which a restart would prefer to the turn."""
        world = self._world
        since_s = world.loop.now_s - WELL_S
        if world.chaos.was_network_bad or not world.watch.was_well_since(ROUTER, since_s):
            return
        for name in world.nodes:
            record = self.records(name).get(key)
            is_claim = record is not None and record.state is not OwnerState.REPLICA
            if is_claim and record.epoch > epoch and world.watch.was_well_since(name, since_s):
                world.fail(
                    f"{talk.name}: acknowledged at epoch {epoch}, but the disk of {name} claims"
                    f" the agent at {record.epoch}"
                )

    def check_tables(self, node):
        """Check that an idle node's disk holds exactly the records of its table.

        Agents whose record is being written, such as an arriving replica, are left out.
        """
        drive = self._world.nodes[node.name].drive
        idle = [agent for agent in node.resources.table if not agent.is_busy]
        busy = {agent.key for agent in node.resources.table if agent.is_busy}
        found = {key: r for key, r in self.records(node.name).items() if key not in busy}
        saved = {agent.key: agent.saved for agent in idle if agent.saved is not None}
        for key in found.keys() | saved.keys():
            table_record, disk_record = saved.get(key), found.get(key)
            if (
                _version(table_record) != _version(disk_record)
                and _file_of(key) not in drive.refused
            ):
                self._world.fail(
                    f"{node.name}: {key} is {_version(table_record)} in its table and"
                    f" {_version(disk_record)} on its disk"
                )
        for agent in idle:
            record, disk_record = agent.manifest, found.get(agent.key)
            if record.state is OwnerState.OWNED or _file_of(agent.key) in drive.refused:
                continue
            if disk_record is None or (disk_record.state, disk_record.epoch) != (
                record.state,
                record.epoch,
            ):
                self._world.fail(
                    f"{node.name}: {agent.key} is {record.state} at epoch {record.epoch},"
                    f" and on its disk {_version(disk_record)}"
                )

    # --- erased ------------------------------------------------------------------------------

    def check_receipts(self, key, erasure):
        """Check that the receipts of an erasure match the disks of their nodes."""
        digest = agent_digest(CLUSTER_KEY, *key)
        for receipt in erasure.receipts:
            host = self._world.nodes[receipt.node]
            tombstone = f"{TOMBSTONES}agents/{digest}"
            if receipt.tombstone is not None and tombstone not in host.drive.files:
                self._world.fail(f"{receipt.node} reports a tombstone that its disk lacks")
            record = self.records(receipt.node).get(key)
            reported = receipt.tombstone
            is_old = record is not None and reported is not None
            is_old = is_old and record.epoch <= reported.epoch
            if is_old and receipt.node not in erasure.unreachable:
                self._world.fail(f"{receipt.node} reports {key} as erased, but keeps its record")

    def check_erased(self, name, marker):
        """Check that no file of any disk contains an erased word."""
        forms = (marker.encode(), token_bytes([ord(char) for char in marker]))
        for node, host in self._world.nodes.items():
            for file, raw in host.drive.files.items():
                if any(form in raw for form in forms):
                    self._world.fail(f"{name}: erased, but {node} still has words of it in {file}")
                    return


def _version(record):
    return None if record is None else (record.epoch, record.revision, record.state.value)


def _file_of(key):
    return f"{_RECORDS}{agent_digest(CLUSTER_KEY, *key)}.mf"
