"""Faults put into what follows borrowed memory to an erasure, which the simulation must find."""

from unittest.mock import patch

from node.store.tombstones import TombstoneStore
from node.tiers.derived_memory import DerivedMemory, DroppedMemory


def erasures_do_not_reach_borrowers():
    """Keep what others borrowed of an erased agent."""
    return patch.object(TombstoneStore, "has_erased_lender", lambda *_: False)


def receipts_count_no_derived_memory():
    """Leave what borrowers lose out of the receipt."""
    drop = DerivedMemory.drop

    async def uncounted(self, tenant=None):
        await drop(self, tenant)
        return DroppedMemory()

    return patch.object(DerivedMemory, "drop", uncounted)


LENDING_PLANTS = (erasures_do_not_reach_borrowers, receipts_count_no_derived_memory)
