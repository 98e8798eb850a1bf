"""Where everything stands in the pictures of a report. Pure: stories in, shapes out.

Trees are laid out in lines. The longest branch of a node goes on to its right, and at the end of
the line on the next one; its other branches get lines of their own below it. So a chain through
hundreds of workers fits a page, and so does a wide tree. Edges run between the boxes, never through
them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

#: Pixels of a page: its width, between the boxes of a line, and beside them.
WIDE, GAP, MARGIN = 900, 20, 4

#: How high boxes are, and how far apart lines are: of up to so many boxes, and of more.
MANY = 60
AIRY, DENSE = (32, 20), (26, 12)

#: Pixels of a letter, about, in the larger and the smaller type.
LETTER, SMALL = 6.7, 5.6


@dataclass
class Box:
    """A node of the tree."""

    name: str
    label: str
    note: str
    kind: str
    title: str
    x: float = 0.0
    y: float = 0.0
    wide: float = 0.0
    high: float = 0.0


@dataclass
class Edge:
    """A line from one box to another: an SVG path."""

    path: str
    kind: str
    title: str


@dataclass
class Link:
    """From whom to whom, before it is known where they stand."""

    source: str
    target: str
    kind: str = "good"
    title: str = ""


@dataclass
class Picture:
    """Shapes, and how much room they take."""

    wide: float
    high: float
    boxes: list[Box] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


def tree(boxes: Sequence[Box], links: Sequence[Link], extra: Sequence[Link] = ()) -> Picture:
    """Lay out a tree, or several.

    Parameters
    ----------
    boxes : sequence of Box
        In the order in which siblings are to stand.
    links : sequence of Link
        The tree: the first link to a box that does not close a circle says where it stands.
    extra : sequence of Link
        Others, to be drawn only.
    """
    wide = max(44.0, *(max(len(b.label) * LETTER, len(b.note) * SMALL) + 12 for b in boxes))
    wide = float(min(round(wide), 160))
    columns = max(int((WIDE - 2 * MARGIN + GAP) // (wide + GAP)), 2)
    order = {box.name: box for box in boxes}
    children = _children(order, links)
    at = _places(order, children, columns)
    high, lane = AIRY if len(boxes) <= MANY else DENSE
    for name, (line, column) in at.items():
        box = order[name]
        box.wide, box.high = wide, high
        box.x = MARGIN + column * (wide + GAP)
        box.y = lane + line * (high + lane)
    lines = 1 + max(line for line, _ in at.values())
    edges = [
        Edge(_path(order[link.source], order[link.target], lane), link.kind, link.title)
        for link in (*links, *extra)
        if link.source in order and link.target in order
    ]
    return Picture(WIDE, lines * (high + lane) + lane, list(boxes), edges)


def _children(names: Collection[str], links: Sequence[Link]) -> dict[str, list[str]]:
    """Who is below whom, such that nobody is below itself."""
    parent: dict[str, str] = {}
    for link in links:
        above: str | None = link.source
        while above is not None and above != link.target:
            above = parent.get(above)
        if above is None and link.target not in parent:
            parent[link.target] = link.source
    children: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        if name in parent:
            children[parent[name]].append(name)
        else:
            children[""].append(name)
    return children


def _sizes(children: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """How many are in each branch."""
    ahead, seen = [""], []
    while ahead:
        name = ahead.pop()
        seen.append(name)
        ahead += children.get(name, ())
    sizes: dict[str, int] = {}
    for name in reversed(seen):
        sizes[name] = 1 + sum(sizes[child] for child in children.get(name, ()))
    return sizes


def _places(
    names: Collection[str], children: Mapping[str, Sequence[str]], columns: int
) -> dict[str, tuple[int, int]]:
    """Line and column of each box."""
    sizes = _sizes(children)
    at: dict[str, tuple[int, int]] = {}

    def longest(name: str) -> str | None:
        return max(children.get(name, ()), key=sizes.__getitem__, default=None)

    def branch(name: str, line: int, column: int) -> int:
        """Place a branch; return the first line below it."""
        indent, path = column, []
        here: str | None = name
        while here is not None:
            at[here] = (line, column)
            path.append(here)
            here = longest(here)
            column += 1
            if here is not None and column == columns:
                line, column = line + 1, min(indent, 1)
        line += 1
        for above in reversed(path):
            heavy = longest(above)
            rest = [child for child in children.get(above, ()) if child != heavy]
            line = others(rest, line, min(at[above][1] + 1, columns - 1))
        return line

    def others(rest: Sequence[str], line: int, first: int) -> int:
        """Place siblings: those without branches of their own side by side."""
        column = first
        for name in (name for name in rest if sizes[name] == 1):
            if column == columns:
                line, column = line + 1, first
            at[name] = (line, column)
            column += 1
        line += column > first
        for name in (name for name in rest if sizes[name] > 1):
            line = branch(name, line, first)
        return line

    line = 0
    for root in sorted(children.get("", ()), key=lambda name: sizes[name] == 1):
        line = branch(root, line, 0)
    return at


def _path(source: Box, target: Box, lane: float) -> str:
    """A way between the boxes: straight on, or down (or up) beside them."""
    x, y = source.x + source.wide, source.y + source.high / 2
    if source.y == target.y and 0 <= target.x - x <= GAP:
        return f"M{x:g} {y:g}H{target.x - 2:g}"
    gutter = x + GAP / 2 + 2 * (int(source.y) // int(source.high + lane) % 3 - 1)
    over = target.x + target.wide / 2
    return f"M{x:g} {y:g}H{gutter:g}V{target.y - lane / 2:g}H{over:g}V{target.y - 2:g}"


# Time


@dataclass
class Bar:
    """A link, over time. ``wait``: the part of it before the first byte."""

    label: str
    note: str
    kind: str
    title: str
    x: float
    y: float
    wide: float
    wait: float
    note_x: float
    note_left: bool


@dataclass
class Timeline:
    """Bars under each other, ticks, and arrows from where one ended to where another went on."""

    wide: float
    high: float
    row: float
    bars: list[Bar]
    ticks: list[tuple[float, str]]
    arrows: list[str]


@dataclass
class Span:
    """What is to be a bar: seconds since the beginning."""

    label: str
    note: str
    kind: str
    title: str
    start: float
    stop: float
    wait: float = 0.0
    goes_on: int | None = None  #: the bar from which this one took over


def timeline(spans: Sequence[Span], seconds: float) -> Timeline:
    """Lay out what happened over time."""
    row = 20.0 if len(spans) <= 60 else 14.0
    left = MARGIN + min(max(len(span.label) for span in spans) * SMALL + 8, 300)
    scale = (WIDE - left - MARGIN) / max(seconds, 1e-9)
    bars = []
    for number, span in enumerate(spans):
        x = left + span.start * scale
        wide = max((span.stop - span.start) * scale, 2.0)
        note = len(span.note) * SMALL + 4
        fits = note < WIDE - x - wide
        inside = not fits and note < wide
        note_x = x + wide + 4 if fits else x + wide - 4 if inside else x - 4
        bars.append(
            Bar(
                span.label,
                span.note,
                span.kind + (" inside" if inside else ""),
                span.title,
                x,
                number * row,
                wide,
                min(span.wait * scale, wide),
                note_x,
                not fits,
            )
        )
    arrows = [
        f"M{bars[span.goes_on].x + bars[span.goes_on].wide:g} {bars[span.goes_on].y + row / 2:g}"
        f"V{bar.y + row / 2:g}"
        for bar, span in zip(bars, spans, strict=True)
        if span.goes_on is not None
    ]
    ticks = [(left + at * scale, f"{at:g} s") for at in _ticks(seconds)]
    return Timeline(WIDE, len(spans) * row + 24, row, bars, ticks, arrows)


def _ticks(seconds: float) -> Iterator[float]:
    """Round numbers, some eight of them."""
    step = 10.0**-6
    while seconds / step > 10:
        for factor in (2, 2.5, 2):
            step *= factor
            if seconds / step <= 10:
                break
    at = 0
    while at * step <= seconds:
        yield round(at * step, 9)
        at += 1
