"""The page, made with Bokeh. What it shows is in :mod:`dask_hoplite.dashboard.drawing`.

Only to be imported where there is Bokeh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from bokeh.core.properties import without_property_validation
from bokeh.document import Document
from bokeh.layouts import column
from bokeh.models import (
    ColumnDataSource,
    DataTable,
    Div,
    FixedTicker,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
    TableColumn,
    UIElement,
)
from bokeh.plotting import figure
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from dask_hoplite.dashboard.drawing import COLORS, MOVED, Columns, Drawing
from dask_hoplite.dashboard.picture import Observer, Picture

if TYPE_CHECKING:
    from distributed import Scheduler

#: Milliseconds between updates
PERIOD = 1000

#: Columns and rows for which a plot of trees has room at the least, and pixels for each row
COLUMNS, ROWS, PIXELS = 14, 4, 38

#: Workers whose names are at the axis
NAMED = 24

ABSENT = "Hoplite is not installed on this scheduler."
NOTHING = "Nothing moves at the moment."

CELLS = ["x", "bottom", "top", "filled", "color", "line", "label", "percent"]
CELLS += ["worker", "source", "done", "rate", "note"]
EDGES = ["x0", "y0", "x1", "y1", "cx", "cy", "mx", "my", "angle", "color"]
WORKERS = ["x_in", "x_out", "worker", "received", "sent", "receiving", "sending"]
OBJECTS = {
    "object": ("object", 240),
    "kind": ("kind", 70),
    "size": ("size", 80),
    "copies": ("copies", 50),
    "busy": ("receiving", 65),
    "done": ("done", 50),
    "rate": ("rate", 90),
    "hops": ("hops", 45),
    "changes": ("re-parented", 75),
    "contributors": ("contributors", 300),
}
CHANGES = {
    "time": ("time", 65),
    "object": ("object", 200),
    "receiver": ("receiver", 110),
    "left": ("from", 110),
    "source": ("to", 110),
    "at": ("at byte", 80),
    "reason": ("reason", 260),
}


#: What states are called beside their colours
WORDS = {"whole": "had all of it", "done": "is done", "slow": "slow: others pass it"}


class Watch:
    """One scheduler's drawing, made once a second at the most for all pages that are open."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.observer = Observer()
        self.picture: Picture | None = None
        self.last: Drawing | None = None

    def drawing(self) -> Drawing | None:
        """What there is to see; None without Hoplite."""
        hoplite = self.scheduler.extensions.get("hoplite")
        if hoplite is None or not hoplite.ready.is_set():
            return None
        now = monotonic()
        picture = self.observer.look(hoplite, now)
        if self.last is None or picture is not self.picture:
            self.picture = picture
            self.last = Drawing(picture, self._name, time() - now)
        return self.last

    def _name(self, address: str) -> str:
        """What people call who has this address, or sends from outside."""
        worker = self.scheduler.workers.get(address)
        if worker is not None and worker.name != address:
            return str(worker.name)
        return address.rpartition("://")[2]


class Trees:
    """Who takes from whom, and how far each is."""

    def __init__(self) -> None:
        self.cells, self.edges = source(CELLS), source(EDGES)
        self.heads = source(["x", "y", "text"])
        self.root = plot = figure(
            title="Who takes from whom",
            x_range=Range1d(-0.7, COLUMNS - 0.3),
            y_range=Range1d(-ROWS, 0.6),
            height=ROWS * PIXELS + 60,
            min_width=600,
            sizing_mode="stretch_width",
            tools="",
            toolbar_location=None,
            outline_line_color=None,
        )
        plot.axis.visible = False
        plot.grid.visible = False
        bend = {"x0": "x0", "y0": "y0", "x1": "x1", "y1": "y1", "cx": "cx", "cy": "cy"}
        plot.quadratic(**bend, source=self.edges, line_color="color", line_width=1.5)
        plot.scatter(
            "mx", "my", angle="angle", marker="triangle", size=7, color="color", source=self.edges
        )
        box = {"x": "x", "width": 0.72, "bottom": "bottom", "source": self.cells}
        outline = plot.vbar(**box, top="top", fill_color="white", line_color="line", line_width=1.5)
        plot.vbar(**box, top="filled", fill_color="color", line_color=None)
        words = {"x": "x", "source": self.cells, "text_align": "center", "text_font_size": "9px"}
        plot.text(y="bottom", text="label", text_baseline="top", text_color="#444444", **words)
        plot.text(
            y="top", text="percent", text_baseline="top", y_offset=4, text_color="black", **words
        )
        plot.text(
            "x", "y", "text", source=self.heads, text_font_size="12px", text_baseline="middle"
        )
        plot.add_tools(HoverTool(renderers=[outline], tooltips=TOOLTIP))

    def update(self, drawing: Drawing) -> None:
        """Show another drawing."""
        put(self.cells, drawing.cells)
        put(self.edges, drawing.edges)
        put(self.heads, drawing.heads)
        rows, columns = max(drawing.rows, ROWS), max(drawing.columns, COLUMNS)
        if self.root.x_range.end != columns - 0.3:
            self.root.x_range.end = columns - 0.3
        if self.root.y_range.start != -rows:
            self.root.y_range.start = -rows
            self.root.height = rows * PIXELS + 60


TOOLTIP = """
<div style="max-width: 420px"><b>@worker</b> takes from @source<br>@done<br>@rate<br>
@note</div>
"""


class Bytes:
    """What each worker has received and sent."""

    def __init__(self) -> None:
        self.source = source(WORKERS)
        self.names: list[str] = []
        self.root = plot = figure(
            title="Bytes by worker",
            x_range=Range1d(-0.6, 3.6),
            height=240,
            min_width=600,
            sizing_mode="stretch_width",
            tools="",
            toolbar_location=None,
        )
        plot.y_range.start = 0
        bars = [
            plot.vbar(x, 0.38, top, source=self.source, color=color, legend_label=label)
            for x, top, color, label in (
                ("x_in", "received", COLORS["receiving"], "in"),
                ("x_out", "sent", COLORS["done"], "out"),
            )
        ]
        plot.yaxis.formatter = NumeralTickFormatter(format="0 b")
        plot.xgrid.visible = False
        plot.legend.orientation = "horizontal"
        plot.legend.border_line_color = None
        plot.legend.padding = plot.legend.margin = 0
        plot.add_layout(plot.legend[0], "above")
        tips = [
            ("worker", "@worker"),
            ("in", "@received{0.0 b}, @receiving"),
            ("out", "@sent{0.0 b}, @sending"),
        ]
        plot.add_tools(HoverTool(renderers=bars, tooltips=tips))

    def update(self, drawing: Drawing) -> None:
        """Show another drawing."""
        put(self.source, drawing.workers)
        names = drawing.workers["worker"]
        if names != self.names:
            self.root.x_range.end = max(len(names), 4) - 0.4
            shown = names if len(names) <= NAMED else []
            if shown or len(self.names) <= NAMED:
                self.root.xaxis.ticker = FixedTicker(ticks=list(range(len(shown))))
                self.root.xaxis.major_label_overrides = dict(enumerate(shown))
            self.names = names


class Table:
    """Rows of text."""

    def __init__(self, title: str, columns: Mapping[str, tuple[str, int]], attribute: str):
        self.attribute = attribute
        self.source = source(list(columns))
        self.drawn = 0
        self.table = DataTable(
            source=self.source,
            columns=[
                TableColumn(field=name, title=title, width=width)
                for name, (title, width) in columns.items()
            ],
            index_position=None,
            reorderable=False,  # or Bokeh misses a library, and says so
            height=160,
            sizing_mode="stretch_width",
        )
        self.root = column(Div(text=f"<b>{title}</b>"), self.table, sizing_mode="stretch_width")

    def update(self, drawing: Drawing) -> None:
        """Show another drawing."""
        if put(self.source, getattr(drawing, self.attribute)):
            # Bokeh (3.9) draws a table anew if the number of its rows changes, or any property of
            # its view.
            self.drawn += 1
            self.table.view.tags = [self.drawn]


class Summary:
    """What is going on, in one line, and what the colours mean."""

    def __init__(self) -> None:
        self.line = Div(text=NOTHING, name="hoplite-summary")
        meanings = [(color, WORDS.get(state, state)) for state, color in COLORS.items()]
        meanings.append((MOVED, "outlined: was given another source"))
        legend = " &nbsp; ".join(
            f'<span style="color:{color};font-size:130%">&#9632;</span> {words}'
            for color, words in meanings
        )
        self.root = column(self.line, Div(text=legend), sizing_mode="stretch_width")

    def update(self, drawing: Drawing) -> None:
        """Show another drawing."""
        self.line.text = f"<b>{drawing.summary}</b>"


PARTS: dict[str, Callable[[], Any]] = {
    "trees": Trees,
    "bytes": Bytes,
    "objects": partial(Table, "Objects", OBJECTS, "objects"),
    "changes": partial(Table, "Changes of source", CHANGES, "changes"),
}


def page(watch: Watch, extra: Mapping[str, Any], document: Document) -> None:
    """Fill a document with all there is to see, in Dask's own frame."""
    parts = [Summary(), *(make() for make in PARTS.values())]
    show(watch, document, parts)
    document.title = "Dask: Hoplite"
    document.template = env.get_template("simple.html")
    document.template_variables.update(extra)


def individual(name: str, watch: Watch, extra: Mapping[str, Any], document: Document) -> None:
    """Fill a document with one plot or table: what JupyterLab's extension shows in a panel."""
    part = PARTS[name]()
    show(watch, document, [part])
    document.title = f"Dask: Hoplite {name}"


def show(watch: Watch, document: Document, parts: list[Any]) -> None:
    """Keep a document up to date, from now until it is closed."""
    absent = Div(text=ABSENT, visible=False, name="hoplite-absent")
    roots: list[UIElement] = [part.root for part in parts]
    document.add_root(column(absent, *roots, sizing_mode="stretch_width"))
    document.theme = BOKEH_THEME

    @without_property_validation
    def update() -> None:
        drawing = watch.drawing()
        if absent.visible != (drawing is None):
            absent.visible = drawing is None
            for root in roots:
                root.visible = drawing is not None
        if drawing is not None:
            for part in parts:
                part.update(drawing)

    update()
    document.add_periodic_callback(update, PERIOD)


def source(columns: list[str]) -> ColumnDataSource:
    """Columns, empty as yet."""
    return ColumnDataSource({name: [] for name in columns})


def put(into: ColumnDataSource, columns: Columns) -> bool:
    """Send those columns that are not as they were; return whether there were any."""
    new = {name: columns.get(name, []) for name in into.data}
    changed = {name: values for name, values in new.items() if into.data[name] != values}
    if changed:
        into.data.update(changed)
    return bool(changed)
