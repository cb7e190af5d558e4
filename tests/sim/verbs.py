"""Settings that clients give their agents, and the judge of their effect."""

from fabric.record.manifest import AgentSettings, OwnerState

HOT = "hot"


class Verbs:
    """Changes of settings (decay, close, evict, share) in one run."""

    def __init__(self, world, api, stream):
        self._world = world
        self._api = api
        self._stream = stream
        # By agent: since when its memory is certainly private, and the node that acknowledged it.
        self._private = {}

    def is_private(self, key, node=None):
        """Return whether an agent's memory is acknowledged as private.

        With `node`: and whether that node must know it.
        """
        if key not in self._private:
            return False
        since_s, node_name = self._private[key]
        evicted = self._world.watch.was_evicted
        if any(evicted(key, each, since_s) for each in self._world.nodes):
            return False
        return node is None or not self._world.reuse_judge.may_have_less(
            key, node, node_name, since_s
        )

    def forget(self, key):
        """Record that an agent was erased."""
        self._private.pop(key, None)

    async def change_settings(self, talk):
        """Change a random setting of an agent."""
        random = self._stream(talk)
        verb = random.choice([self._close, self._evict, self._decay, self._share, self._share])
        await verb(talk, random)

    async def _close(self, talk, random):
        row, _ = await self._api.repeat_call(talk, random, "close")
        if row is None:
            return
        if HOT in row["tiers"] or row["pinned"] or not row["closed"]:
            self._world.fail(f"{talk.name}: closed, but {row}")
        self._check_record(talk, lambda settings: settings.is_closed, "closed")

    async def _evict(self, talk, random):
        world = self._world
        node = random.choice([None, None, *world.nodes])
        body = None if node is None else {"from": "disk", "node": node}
        row, _ = await self._api.repeat_call(talk, random, "evict", body)
        if row is None:
            return
        if node is None and (HOT in row["tiers"] or "disk" not in row["tiers"]):
            world.fail(f"{talk.name}: evicted, but it is in {row['tiers']}")
        if node == row["node"]:
            world.fail(f"{talk.name}: evicted from the disk of {node}, which owns it")

    async def _decay(self, talk, random):
        if random.random() < 0.3:
            await self._api.repeat_call(talk, random, "last")
            return
        after_s = random.choice([0, 5, 60])
        row, _ = await self._api.repeat_call(talk, random, "decay", {"after_s": after_s})
        if row is None:
            return
        if row["decays_after_s"] != after_s:
            self._world.fail(f"{talk.name}: it decays after {row['decays_after_s']}, not {after_s}")
        self._check_record(talk, lambda settings: settings.decays_after_s == after_s, "decaying")

    async def _share(self, talk, random):
        await self.share(talk, random.choice(["agent", "agent", "tenant"]))

    async def share(self, talk, scope):
        """Set which agents may reuse an agent's memory."""
        random = self._stream(talk)
        self._private.pop(talk.key, None)  # until it is acknowledged
        lineage = self._world.lineage
        series = lineage.begin_series(talk.key)
        if scope == "tenant":
            lineage.allow(talk.key)
        row, _ = await self._api.repeat_call(talk, random, "share", {"scope": scope})
        if row is None:
            return
        if row["share"] != scope:
            self._world.fail(f"{talk.name}: shared with its {row['share']}, not its {scope}")
        self._check_record(talk, lambda settings: settings.is_private == (scope == "agent"), scope)
        if scope == "agent":
            self._private[talk.key] = self._world.loop.now_s, row["node"]
            if not talk.has_record_copies:  # a copy's memory is its own
                lineage.revoke(talk.key, series)

    def _check_record(self, talk, holds, what):
        """Check that an owner's disk has a setting, unless a turn may have changed it since."""
        world = self._world
        if talk.attempts or talk.may_be_erased or world.watch.evicted[talk.key]:
            return
        records = [world.disk_judge.records(name).get(talk.key) for name in world.nodes]
        owned = [r for r in records if r is not None and r.state is not OwnerState.REPLICA]
        if owned and not world.network.is_bad and not any(holds(_settings_of(r)) for r in owned):
            world.fail(f"{talk.name}: reported {what}, but on no disk")


def _settings_of(record):
    return record.settings or AgentSettings()
