"""The KV view without a kernel: picture, sentences, a table of the requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkref.widgets.figure import Figure, Table
from mkref.widgets.kv.changes import describe_changes
from mkref.widgets.kv.history import KINDS
from mkref.widgets.kv.picture import KvPicture

if TYPE_CHECKING:
    from mkref.widgets.kv.model import KvView

__all__ = ["figure", "summary", "table"]


def summary(view: KvView) -> str:
    """The step, the pages of both kinds, and what happened since the step before."""
    moment, history = view.moment, view.history
    label = history.provenance.get("label", "measured")
    where = history.provenance.get("machine", "")
    head = f"{where} [{label}]: " if where else f"[{label}] "
    rows = f"{len(moment.rows)} of {history.n_rows} rows" if moment.rows else "no rows"
    batch = f"{len(moment.running)} running, {len(moment.waiting)} waiting"
    parts = [f"{head}step {view.at} feeds {rows}; {batch}."]
    for kind, name in enumerate(KINDS):
        sums = view.sums(kind)
        if sums.total:
            parts.append(
                f"Of {sums.total} {name} pages {sums.used} are used ({sums.shared} shared), "
                f"{sums.cached} cached, {sums.free} free."
            )
    said = describe_changes(view.changes)
    held = moment.of(view.selected)
    if held is not None:
        parts.append(
            f"Selected: {held.name} holds {len(held.pages[0])} full and {len(held.pages[1])} "
            f"sliding pages."
        )
    return " ".join([*parts, said] if said else parts)


def table(view: KvView) -> Table:
    """The requests: what they feed, what is in the cache, which pages they hold."""
    rows = []
    for held in view.moment.running:
        pages = [", ".join(map(str, held.pages[kind])) or "-" for kind in range(len(KINDS))]
        rows.append(
            (
                held.name, view.rows_of(held.name), f"{held.tokens}", f"{held.prompt}",
                f"{held.found}", pages[0], pages[1], str(view.freed(held, 1)),
            )
        )  # fmt: skip
    rows += [(name, "waits", "-", "-", "-", "-", "-", "-") for name in view.moment.waiting]
    heads = ("request", "feeds", "tokens in cache", "prompt", "found in cache", "full pages")
    return Table((*heads, "sliding pages", "given back"), tuple(rows))


def figure(view: KvView) -> Figure:
    """Picture, sentences and table."""
    said = summary(view)
    return Figure(KvPicture(view, said).svg, said, table(view))
