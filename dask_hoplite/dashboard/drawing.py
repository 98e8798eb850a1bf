"""Where on a page each part of a picture is, and in which words: columns for plots and tables.

No Bokeh here: columns are plain lists.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from time import localtime, strftime
from typing import Any

from dask.utils import format_bytes

from dask_hoplite.dashboard.picture import Cell, Picture, Sketch

Columns = dict[str, list[Any]]
Place = tuple[int, int]

#: Cells in a row; rows of a tree that branches; rows, and cells with a name, on a page
WIDTH, TALL, ROWS, NAMED = 24, 12, 40, 96

#: Share of its place that a cell takes
SIDE = 0.62

#: Colours that remain distinct for those who see fewer of them
COLORS = {
    "whole": "#009e73",
    "done": "#0072b2",
    "receiving": "#56b4e9",
    "slow": "#e69f00",
    "silent": "#d55e00",
}
EDGE, MOVED = "#8a94a0", "#d55e00"


class Forest:
    """The cells of a sketch in an order in which neighbours belong together.

    A tree grows from a copy to those that take it, or from a result to the sums that go into it.
    """

    def __init__(self, sketch: Sketch):
        self.children: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
        fed: set[Hashable] = set()
        for cell in sketch.cells.values():
            for source in cell.sources:
                if source in sketch.cells:
                    pair = (source, cell.name)
                    parent, child = pair if sketch.kind == "transfer" else pair[::-1]
                    self.children[parent].append(child)
                    fed.add(child)
        self.parent: dict[Hashable, Hashable] = {}
        self.depth: dict[Hashable, int] = {}
        self.size: dict[Hashable, int] = {}  # of the subtree
        # What is fed in a circle has no root.
        names = sorted(sketch.cells, key=lambda name: name in fed)
        self.roots = [name for name in names if name not in self.depth and self._span(name)]
        for name in reversed(list(self.depth)):
            self.size[name] = 1 + sum(self.size[child] for child in self._own(name))

    def _span(self, root: Hashable) -> bool:
        """Reach all that belongs to a root, each once, and parents before their children."""
        self.depth[root] = 0
        ahead = [root]
        while ahead:
            name = ahead.pop()
            for child in self.children[name]:
                if child not in self.depth:
                    self.depth[child] = self.depth[name] + 1
                    self.parent[child] = name
                    ahead.append(child)
        return True

    def _own(self, name: Hashable) -> list[Hashable]:
        return [child for child in self.children[name] if self.parent.get(child) == name]

    def walk(self, *, largest_first: bool) -> list[Hashable]:
        """All names, parents before their children, and each subtree in one piece."""
        order = []
        ahead = self.roots[::-1]
        while ahead:
            name = ahead.pop()
            order.append(name)
            own = dict.fromkeys(self._own(name))
            next_ones = sorted(own, key=self.size.__getitem__, reverse=largest_first)
            ahead += reversed(next_ones)
        return order

    def places(self, width: int = WIDTH, tall: int = TALL) -> dict[Hashable, Place]:
        """Column and row of each: one row for each branch if that fits, or else in a snake."""
        if max(self.depth.values(), default=0) < width:
            rows: dict[Hashable, int] = {}
            used = 0
            first = True
            before: Hashable = None
            for name in self.walk(largest_first=True):
                goes_on = not first and self.parent.get(name, self) == before
                rows[name] = rows[before] if goes_on else used
                used += not goes_on
                first, before = False, name
            if used <= tall:
                return {name: (self.depth[name], row) for name, row in rows.items()}
        return snake(self.walk(largest_first=False), width)


def snake(names: Iterable[Hashable], width: int) -> dict[Hashable, Place]:
    """Rows from left to right and back, so that what follows is always beside."""
    places = {}
    for index, name in enumerate(names):
        row, column = divmod(index, width)
        places[name] = (width - 1 - column if row % 2 else column, row)
    return places


class Drawing:
    """Columns for the plots and tables of a page.

    Parameters
    ----------
    picture : Picture
        What is to be seen.
    name_of : callable of a str, giving a str
        What people call the worker of an address, or who else sends.
    offset : float
        Seconds from the picture's clock to that of the day.
    """

    def __init__(self, picture: Picture, name_of: Callable[[str], str], offset: float = 0.0):
        self.picture = picture
        self.name_of = name_of
        self.offset = offset
        self.cells: Columns = defaultdict(list)
        self.edges: Columns = defaultdict(list)
        self.heads: Columns = defaultdict(list)
        self.rows = self.columns = 0  # that are taken
        self.left_out = 0
        total = sum(len(sketch.cells) for sketch in picture.sketches)
        self.named = total <= NAMED
        self.forests = [Forest(sketch) for sketch in picture.sketches]
        for sketch, forest in zip(picture.sketches, self.forests, strict=True):
            self._draw(sketch, forest)
        self.workers = self._workers()
        self.objects = self._objects()
        self.changes = self._changes()
        self.summary = self._summary()

    # Trees

    def _draw(self, sketch: Sketch, forest: Forest) -> None:
        room = ROWS - self.rows
        if room < 2:
            self.left_out += 1
            return
        places = {name: at for name, at in forest.places().items() if at[1] < room - 1}
        hidden = len(sketch.cells) - len(places)
        add(self.heads, x=-0.5, y=-self.rows, text=heading(sketch, hidden))
        top = -self.rows - 1
        at = {name: (x, top - y) for name, (x, y) in places.items()}
        for name, place in at.items():
            self._draw_cell(sketch, sketch.cells[name], place)
            for source in sketch.cells[name].sources:
                if source in at:
                    moved = sketch.cells[name].moved
                    add(self.edges, **edge(at[source], place), color=MOVED if moved else EDGE)
        self.rows += 2 + max((y for _, y in places.values()), default=0)
        self.columns = max(self.columns, *(1 + x for x, _ in places.values()))

    def _draw_cell(self, sketch: Sketch, cell: Cell, place: Place) -> None:
        x, y = place
        worker = self.name_of(cell.worker)
        sources = [sketch.cells[name].worker for name in cell.sources if name in sketch.cells]
        what = "has" if sketch.kind == "transfer" else "has made"
        done = f"{what} {format_bytes(cell.received)} of {format_bytes(cell.nbytes)}"
        add(
            self.cells,
            x=x,
            bottom=y - SIDE / 2,
            top=y + SIDE / 2,
            filled=y - SIDE / 2 + SIDE * cell.share,
            color=COLORS[cell.state],
            line=MOVED if cell.moved else COLORS[cell.state],
            label=short(worker) if self.named else "",
            percent=f"{cell.share:.0%}" if self.named and cell.busy else "",
            worker=worker,
            source=", ".join(map(self.name_of, sources)) or "–",
            done=f"{cell.state}: {done} ({cell.share:.0%})",
            rate=per_second(cell.rate),
            note=cell.note + (f"; {listed(cell.operands)}" if cell.operands else ""),
        )

    # Workers

    def _workers(self) -> Columns:
        columns: Columns = defaultdict(list)
        for place, traffic in enumerate(self.picture.traffic):
            add(
                columns,
                x_in=place - 0.2,
                x_out=place + 0.2,
                worker=self.name_of(traffic.worker),
                received=traffic.received,
                sent=traffic.sent,
                receiving=per_second(traffic.receiving),
                sending=per_second(traffic.sending),
            )
        return columns

    # Tables

    def _objects(self) -> Columns:
        columns: Columns = defaultdict(list)
        for sketch, forest in zip(self.picture.sketches, self.forests, strict=True):
            busy = sum(cell.busy for cell in sketch.cells.values())
            contributors = ""
            if sketch.wanted:
                contributors = f"{len(sketch.contributors)} of {sketch.wanted}"
                contributors += f": {listed(sketch.contributors)}" if sketch.contributors else ""
            add(
                columns,
                object=str(sketch.key),
                kind=sketch.kind,
                size=format_bytes(sketch.nbytes),
                copies=str(sketch.copies) if sketch.kind == "transfer" else "–",
                busy=busy,
                done=f"{sketch.share:.0%}",
                rate=per_second(sketch.rate or None),
                hops=max(forest.depth.values(), default=0),
                changes=sketch.changes,
                contributors=contributors,
            )
        for key, copies in self.picture.kept:
            row = dict.fromkeys(("size", "done", "rate", "contributors"), "")
            none: Mapping[str, Any] = dict.fromkeys(("busy", "hops", "changes"), 0)
            add(columns, object=str(key), kind="kept", copies=str(copies), **row, **none)
        return columns

    def _changes(self) -> Columns:
        columns: Columns = defaultdict(list)
        for change in self.picture.changes:
            add(
                columns,
                time=strftime("%H:%M:%S", localtime(change.time + self.offset)),
                object=str(change.key),
                receiver=self.name_of(change.receiver),
                left=self.name_of(change.left),
                source=self.name_of(change.source),
                at=format_bytes(change.at),
                reason=change.reason,
            )
        return columns

    def _summary(self) -> str:
        picture = self.picture
        moving = sum(not sketch.over for sketch in picture.sketches)
        said = [
            strftime("%H:%M:%S", localtime(picture.time + self.offset)),
            count(len(picture.traffic), "worker"),
            f"{count(moving, 'object')} moving",
            f"{format_bytes(int(picture.rate))}/s in all",
        ]
        if self.left_out:
            said.append(f"{count(self.left_out, 'more object')} than there is room for")
        return " · ".join(said)


def add(columns: Columns, **row: Any) -> None:
    """A row more."""
    for name, value in row.items():
        columns[name].append(value)


def edge(start: Place, stop: Place) -> dict[str, float]:
    """A line from one place to another, bent if it would pass others, and the arrow on it."""
    (x0, y0), (x1, y1) = start, stop
    along, up = x1 - x0, y1 - y0
    bend = 0.0 if abs(along) + abs(up) <= 1 or (along and up) else 0.9
    length = math.hypot(along, up) or 1.0
    cx = (x0 + x1) / 2 - bend * up / length
    cy = (y0 + y1) / 2 + bend * abs(along) / length
    return {
        "x0": x0,
        "y0": y0,
        "x1": x1,
        "y1": y1,
        "cx": cx,
        "cy": cy,
        "mx": (x0 + 2 * cx + x1) / 4,
        "my": (y0 + 2 * cy + y1) / 4,
        "angle": math.atan2(up, along) - math.pi / 2,
    }


def heading(sketch: Sketch, hidden: int = 0) -> str:
    """What is said of an object above its tree."""
    takers = sketch.takers
    done = sum(not cell.busy for cell in takers)
    said = [f"{shortened(str(sketch.key), 48)}: {format_bytes(sketch.nbytes)}"]
    if sketch.kind == "transfer":
        said.append(f"{done} of {count(len(takers), 'receiver')} done")
    else:
        said.append(f"{sketch.kind} of {len(sketch.contributors)} of {sketch.wanted} operands")
        said.append(f"{done} of {count(len(takers), 'sum')} made")
    said.append(f"{sketch.share:.0%}")
    if sketch.rate:
        said.append(per_second(sketch.rate))
    if sketch.changes:
        said.append(f"re-parented {sketch.changes} ×")
    if hidden:
        said.append(f"{hidden} not shown")
    return " · ".join(said)


def count(n: int, what: str) -> str:
    """So many of something."""
    return f"{n} {what}" + ("s" if n != 1 else "")


def per_second(rate: float | None) -> str:
    """A rate in words."""
    return "–" if rate is None else f"{format_bytes(int(rate))}/s"


def listed(keys: Iterable[Hashable], most: int = 8) -> str:
    """Some keys, and how many more there are."""
    keys = list(keys)
    said = ", ".join(shortened(str(key), 40) for key in keys[:most])
    return said + (f" and {len(keys) - most} more" if len(keys) > most else "")


def shortened(text: str, most: int) -> str:
    """A text without its middle, if it is too long."""
    if len(text) <= most:
        return text
    return f"{text[: most - most // 3 - 1]}…{text[-(most // 3) :]}"


def short(name: str, most: int = 8) -> str:
    """The end of a name, which tells workers of one host from each other."""
    return name if len(name) <= most else f"…{name[1 - most :]}"
