"""Planted faults in keeping edited caches."""

from dataclasses import replace

import numpy as np

from fabric.edit_mode import EditMode
from fabric.kvcache.cache_spec import CacheGroup
from fabric.record.layout import Held
from fabric.record.layout_patches import Patch
from node.agents.agent import Agent
from node.tiers import restore
from node.tiers.record_writer import RecordWriter
from node.turn.prefix import Prefixes
from tests.sim.model import SimCache
from tests.sim.replaced import replaced
from tests.sim.window import SimWindow


def edited_memory_is_offered_to_exact_turns():
    """Rows computed before an edit are reused by exact turns."""
    whole = property(lambda self: self.manifest.tokens_count)
    return replaced(Agent, "exact_tokens", whole)


def edited_blocks_are_named_without_lineage():
    """Blocks computed with edited memory are named without their edit lineage."""
    begin = RecordWriter.__init__

    def unedited(self, parts, agent, cache, layout, cached):
        exact = (
            layout.cut(layout.exact_tokens).without_needless_head()
            if layout.head_tokens
            else layout
        )
        begin(self, parts, agent, cache, exact, cached)

    return replaced(RecordWriter, "__init__", unedited)


def rows_of_cut_blocks_are_read_one_off():
    """The wrong rows are read of a block that an edited cache uses in part."""
    return _misread(CacheGroup.FULL)


def windows_are_read_one_off():
    """The wrong window rows are read of a block that an edited cache uses in part."""
    return _misread(CacheGroup.WINDOW)


def _misread(group):
    read = restore._Restore._read

    def misread(self, expected):
        is_wrong = expected.group is group and expected.first_row > 0
        return read(self, replace(expected, first_row=expected.first_row - is_wrong))

    return replaced(restore._Restore, "_read", misread)


def windows_slide_past_what_lies_ahead():
    """When a hole is filled, the window continues with the rows in front of it."""
    append = SimWindow.append_held_rows

    def missed(self, keep_from, tokens_count):
        self.beside[0][2] = np.zeros_like(self.beside[0][2])
        append(self, keep_from, tokens_count)

    return replaced(SimWindow, "append_held_rows", missed)


def moved_rows_count_as_computed_in_place():
    """A restored edited cache forgets how far its rows were moved."""
    hold = SimCache.hold
    return replaced(
        SimCache, "hold", lambda self, count, ahead, _, *grid: hold(self, count, ahead, (), *grid)
    )


def borrowed_rows_count_as_computed_one_off():
    """Borrowed rows count as shifted by one token less than they were."""
    parts = Patch.parts.fget

    def misplaced(self):
        return tuple(
            replace(part, piece=part.piece.moved(1)) if isinstance(part, Held) else part
            for part in parts(self)
        )

    return replaced(Patch, "parts", property(misplaced))


def rows_are_borrowed_without_request():
    """Turns that keep rows after an edit borrow from others, too."""
    prepare = Prefixes.prepare

    def unasked(self, agent, plan, request):
        if request.edits is EditMode.AMORTIZE:
            request = replace(request, edits=EditMode.ANYWHERE)
        return prepare(self, agent, plan, request)

    return replaced(Prefixes, "prepare", unasked)


EDIT_PLANTS = (
    borrowed_rows_count_as_computed_one_off,
    rows_are_borrowed_without_request,
    edited_memory_is_offered_to_exact_turns,
    edited_blocks_are_named_without_lineage,
    rows_of_cut_blocks_are_read_one_off,
    windows_are_read_one_off,
    windows_slide_past_what_lies_ahead,
    moved_rows_count_as_computed_in_place,
)
