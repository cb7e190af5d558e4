"""The node's last views: each router gets the fields that changed since its last view."""

from collections import OrderedDict
from dataclasses import replace

from fabric.control.change_calls import DescribeChanges, ViewChanges, view_changes, view_fields
from fabric.control.node_calls import NodeView
from node.limits import VIEWS_KEPT_MAX
from node.net.link_table import LinkChanges


class ViewHistory:
    """Last views by number, the newest last; used on the node's event loop."""

    def __init__(self) -> None:
        self._views: OrderedDict[int, NodeView] = OrderedDict()
        self._number = 0

    def changes(self, call: DescribeChanges, view: NodeView, links: LinkChanges) -> ViewChanges:
        """Return the changes since a router's older view; `view` is the current one."""
        view = replace(view, links=())
        if self._number == 0 or self._views[self._number] != view:
            self._number += 1
            self._views[self._number] = view
            if len(self._views) > VIEWS_KEPT_MAX:
                self._views.popitem(last=False)
        before = self._views.get(call.view) if call.incarnation == view.incarnation else None
        return ViewChanges(
            view.incarnation,
            self._number,
            call.view if before is not None else 0,
            links.number,
            view_fields(view) if before is None else view_changes(before, view),
            links.links or None,
            links.has_all or None,
        )
