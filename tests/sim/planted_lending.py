"""Planted faults in following borrowed rows to an erasure."""

import logging
from dataclasses import replace

from fabric.kvcache.cache_spec import CacheGroup
from fabric.record.lenders import merge_lenders
from fabric.record.manifest import OwnerState
from node.migration import copy_targets, hibernation_import
from node.migration.copy_targets import CopyPublisher
from node.migration.target import IncomingCopies
from node.store.block_index import BlockIndex
from node.store.block_store import BlockStore
from node.store.tombstones import TombstoneStore
from node.tiers.derived_memory import DerivedMemory
from node.tiers.directive_store import DirectiveStore
from node.turn.borrowed_spans import BorrowedSpans
from node.turn.prefix import Prefixes
from tests.sim.replaced import replaced

_log = logging.getLogger("node.planted")


def _without_lenders(record):
    head = record.edited
    return record if head is None else replace(record, edited=replace(head, lenders=()))


def erasures_do_not_reach_borrowers():
    """Keep what others borrowed of an erased agent."""
    return replaced(TombstoneStore, "has_erased_lender", lambda *_: False)


def borrowers_name_themselves_as_lenders():
    """Record a borrower as the lender of the rows that it borrowed."""

    def own_name(self, own, _):
        return (self.erased.lender(own),)

    return replaced(BorrowedSpans, "_lenders", own_name)


def borrowers_omit_the_lenders_of_lenders():
    """Record only the last lender of rows that were borrowed twice."""

    def nearest_only(self, own, records):
        nearest = [each for r in records for each in (self.erased.lender(r), self.erased.series(r))]
        return merge_lenders(each for each in nearest if each != self.erased.series(own))

    return replaced(BorrowedSpans, "_lenders", nearest_only)


def _copies_omit_lenders(module):
    anew = module.with_new_owner
    return replaced(module, "with_new_owner", lambda r, *more: _without_lenders(anew(r, *more)))


def forks_omit_lenders():
    """Record no lenders in a fork."""
    return _copies_omit_lenders(copy_targets)


def forks_omit_their_source():
    """Record in a fork its source's lenders, but not the source, whose edited rows it has."""
    return replaced(copy_targets, "derived_from", lambda record, _: record)


def files_omit_lenders():
    """Record no lenders in an agent that is read from a file."""
    return _copies_omit_lenders(hibernation_import)


def files_omit_their_source():
    """Record in a copy by a file its source's lenders, but not the source."""
    return replaced(hibernation_import, "derived_from", lambda record, _: record)


def moves_omit_lenders():
    """Drop the names of an agent's lenders where it arrives."""
    offered = IncomingCopies.decode_offer
    return replaced(
        IncomingCopies, "decode_offer", lambda self, raw: _without_lenders(offered(self, raw))
    )


def replicas_omit_lenders():
    """Keep replicas without the names of lenders."""
    publish = CopyPublisher.publish

    def published(self, agent, record, migration):
        if record.state is OwnerState.REPLICA:
            record = _without_lenders(record)
        return publish(self, agent, record, migration)

    return replaced(CopyPublisher, "publish", published)


def _loans_outlive_changes(of):
    """Revoke no loans where that part of a lender's record changes."""
    publish = DirectiveStore._publish

    async def published(self, agent, record, *, revokes):
        is_same = getattr(record, of) == getattr(agent.manifest, of)
        await publish(self, agent, record, revokes=revokes and is_same)

    return replaced(DirectiveStore, "_publish", published)


def private_lenders_leave_loans():
    """Keep what others borrowed of an agent that is private from then on."""
    return _loans_outlive_changes("settings")


def forgetful_lenders_leave_loans():
    """Keep what others borrowed of an agent that forgets a message."""
    return _loans_outlive_changes("directives")


def erasures_leave_the_quarantine():
    """Keep damaged files in the quarantine."""
    return replaced(BlockStore, "empty_quarantine", lambda _: [])


def _files_stay(group):
    take = BlockIndex.take_unreferenced

    def taken(self, blocks_max):
        blocks = take(self, blocks_max)
        ignored = [ref for ref in blocks if ref.group is group]
        self.settle(ignored)
        return {ref: size for ref, size in blocks.items() if ref not in ignored}

    return replaced(BlockIndex, "take_unreferenced", taken)


def windows_stay_on_disk():
    """Drop unneeded blocks of windows from the index, and leave their files."""
    return _files_stay(CacheGroup.WINDOW)


def states_stay_on_disk():
    """Drop unneeded states from the index, and leave their files."""
    return _files_stay(CacheGroup.STATE)


def borrowers_stay_hot():
    """Cut what a borrower has on disk, and keep its cache."""
    drop = DerivedMemory._drop

    async def kept(self, agent):
        cache, layout = agent.cache, agent.layout
        count = await drop(self, agent)
        if count and agent.cache is None:
            agent.cache, agent.layout = cache, layout
        return count

    return replaced(DerivedMemory, "_drop", kept)


def logs_quote_prompts():
    """Log the end of each prompt."""
    prepare = Prefixes.prepare

    def prepared(self, agent, plan, request):
        _log.info("a turn of %s", plan.text[-80:].decode())
        return prepare(self, agent, plan, request)

    return replaced(Prefixes, "prepare", prepared)


def receipts_count_no_derived_memory():
    """Leave what borrowers lose out of the receipt."""
    return replaced(DerivedMemory, "_note", lambda *_: None)


LENDING_PLANTS = (
    erasures_do_not_reach_borrowers,
    borrowers_name_themselves_as_lenders,
    borrowers_omit_the_lenders_of_lenders,
    forks_omit_lenders,
    forks_omit_their_source,
    files_omit_lenders,
    files_omit_their_source,
    moves_omit_lenders,
    replicas_omit_lenders,
    private_lenders_leave_loans,
    forgetful_lenders_leave_loans,
    erasures_leave_the_quarantine,
    windows_stay_on_disk,
    states_stay_on_disk,
    borrowers_stay_hot,
    logs_quote_prompts,
    receipts_count_no_derived_memory,
)
