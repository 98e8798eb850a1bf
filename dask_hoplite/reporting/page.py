"""The page of a report: what it says, from what the scheduler remembers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dask.utils import format_bytes

from dask_hoplite.reporting.chart import Box, Link, Picture, Span, Timeline, timeline, tree
from dask_hoplite.reporting.story import Arrival, Piece, Story, Takeover, tell

#: From this share of the median rate on, a link does not stand out.
STANDS_OUT = 0.8

#: Shares of the time that are shorter, in seconds, are not shown.
SHOWN = 1e-4


class Names:
    """How workers are called in a report: by their names, or in short by their addresses."""

    def __init__(self, workers: Mapping[str, Mapping[str, Any]], others: Sequence[str] = ()):
        #: ``name`` by address, and whether it is ``there``
        self.workers = workers
        hosts = {_address(address).rpartition(":")[0] for address in (*workers, *others)}
        self.one_host = len({host for host in hosts if host}) == 1

    def short(self, address: str) -> str:
        """For a box."""
        name = str(self.workers.get(address, {}).get("name", address))
        if name != address:
            return name if len(name) <= 22 else f"{name[:6]}…{name[-15:]}"
        if address.startswith("Client-"):
            return "client"
        text = _address(address)
        if self.one_host and ":" in text:
            return f":{text.rpartition(':')[2]}"
        return text if len(text) <= 22 else f"…{text[-21:]}"

    def long(self, address: str) -> str:
        """For a sentence."""
        name = str(self.workers.get(address, {}).get("name", address))
        text = _address(address)
        text = text if name == address else f"{name} ({text})"
        return f"{text} [left]" if self.left(address) else text

    def left(self, address: str) -> bool:
        """Whether it was a worker, and is not any more."""
        return "://" in address and not self.workers.get(address, {}).get("there")


def _address(address: str) -> str:
    return address.rpartition("://")[2]


def part(told: Mapping[str, Any], names: Names, now: float) -> dict[str, Any]:
    """What is to be shown of one object."""
    rows = [row for row in told["rows"] if row["source"] is not None]
    return {
        "key": str(told["key"]),
        "transfers": transfers(tell(told["rows"], now), names) if rows else None,
        "reductions": [reduction(row, names, now) for row in told["reductions"]],
    }


# Transfers


def transfers(story: Story, names: Names) -> dict[str, Any]:
    """What is to be shown of the transfers of an object."""
    picture = _tree(story, names)
    return {
        "facts": _facts(story),
        "verdict": verdict(story, names),
        "shares": [
            {
                "kind": share.name.replace(" ", "-"),
                "percent": f"{100 * share.seconds / sum(s.seconds for s in story.shares):.2f}",
                "time": _time(share.seconds),
                "text": share.text,
            }
            for share in story.shares
            if share.seconds >= SHOWN
        ],
        "rule": _rule(story, names) if story.last is not None else "",
        "takeovers": [takeover(one, story, names) for one in story.takeovers],
        "tree": picture,
        "time": _timeline(story, names, {box.name: (box.y, box.x) for box in picture.boxes}),
        "rows": [
            {
                "source": names.long(piece.source),
                "receiver": names.long(arrival.receiver),
                "first": f"{piece.first:,}",
                "end": f"{piece.end:,}",
                "start": f"{piece.start - story.begin:.3f}",
                "seconds": f"{piece.seconds:.3f}",
                "status": piece.status,
                "path": piece.path,
                "reason": piece.reason,
            }
            for arrival in story.arrivals
            for piece in arrival.pieces
        ],
    }


def _facts(story: Story) -> list[tuple[str, str]]:
    receivers = {arrival.receiver for arrival in story.arrivals}
    got = {arrival.receiver for arrival in story.finished}
    return [
        (format_bytes(story.nbytes), "size"),
        (f"{len(got)} of {len(receivers)}", "receivers have got it"),
        (_time(story.seconds), "from first to last"),
        (f"{format_bytes(int(story.rate))}/s", "median rate of a link"),
        (str(story.depth()), "links in a row, at the most"),
        (str(len(story.takeovers)), "sources replaced"),
    ]


def verdict(story: Story, names: Names) -> str:
    """What bounded the time, in a sentence."""
    if story.last is None:
        return "Nobody has got all of it yet."
    most = max(story.shares, key=lambda share: share.seconds)
    who = names.long(story.last.receiver)
    texts = {
        "late": f"Most of the time had passed when the last receiver, {who}, asked for it.",
        "first byte": f"Most of the time, the last receiver, {who}, waited for its first byte.",
        "given up": f"Most of the time of the last receiver, {who}, was lost with sources that "
        "were given up.",
        "moving": _how_often(story),
    }
    if most.name in texts or story.bottleneck is None:
        return texts.get(most.name, texts["moving"])
    arrival, piece = story.bottleneck
    return f"A slow link bounded the time: {_link(arrival, piece, story, names)}."


def _how_often(story: Story) -> str:
    had = f"all {len(story.finished)} receivers had it after {_time(story.seconds)}."
    if not story.rate:  # an empty object, or all that came was there at the first look
        return f"No link has a rate that is known; {had}"
    once = story.nbytes / story.rate
    return (
        "The time is that of the bytes on a link, about: "
        f"{format_bytes(story.nbytes)} at the median rate take {_time(once)}, and {had}"
    )


def _link(arrival: Arrival, piece: Piece, story: Story, names: Names) -> str:
    share = f", {100 * piece.rate / story.rate:.0f} % of the median" if story.rate else ""
    return (
        f"{names.long(piece.source)} → {names.long(arrival.receiver)} carried "
        f"{format_bytes(int(piece.rate))}/s{share}"
    )


def _rule(story: Story, names: Names) -> str:
    """What the shares are of, and what to know before one believes them."""
    assert story.last is not None
    text = (
        f"This divides the time until the last receiver, {names.long(story.last.receiver)}, had "
        "all of it. Rates count from the first byte of a link, where that is known; a link that "
        "waits for its own source is not faster than that one, so if all links are slow, the first "
        "one may be the cause."
    )
    if story.bottleneck is not None:
        arrival, piece = story.bottleneck
        slow = piece.rate < STANDS_OUT * story.rate
        what = (
            "The slowest link on its way"
            if slow
            else "No link on its way stands out; the first of the slowest"
        )
        text += f" {what}: {_link(arrival, piece, story, names)}."
    return text


def takeover(one: Takeover, story: Story, names: Names) -> str:
    """What happened, with the byte."""
    share = f" of {story.nbytes:,} ({100 * one.byte / story.nbytes:.0f} %)" if story.nbytes else ""
    return (
        f"{names.long(one.receiver)} went on at byte {one.byte:,}{share}, "
        f"{_time(one.at - story.begin)} after the beginning, with {names.long(one.new)} in place "
        f"of {names.long(one.old)}. Why not the old one: {one.why}. Why the new one: {one.reason}."
    )


def _kind(arrival: Arrival) -> str:
    if arrival.status == "running":
        return "run"
    if arrival.status != "finished":
        return "bad"
    return "new" if len(arrival.pieces) > 1 else "good"


def _tree(story: Story, names: Names) -> Picture:
    boxes: dict[str, Box] = {}
    links, extra = [], []
    latest = {arrival.receiver: arrival for arrival in story.arrivals}
    for arrival in story.arrivals:
        for piece in arrival.pieces:
            if piece.source not in latest:
                note = "left" if names.left(piece.source) else ""
                short = names.short(piece.source)
                kind = "bad" if note else "root"
                boxes[piece.source] = Box(
                    piece.source, short, note, kind, _who(piece.source, names)
                )
    for receiver, arrival in latest.items():
        boxes[receiver] = _box(arrival, story, names)
        *before, last = arrival.pieces
        kind = _kind(arrival)
        title = f"{names.long(last.source)} → {names.long(receiver)}: {last.reason}"
        links.append(Link(last.source, receiver, kind, title))
        extra += [
            Link(piece.source, receiver, "bad", f"{_ends(piece, names, receiver)}: {piece.status}")
            for piece in before
        ]
    return tree(list(boxes.values()), links, extra)


def _ends(piece: Piece, names: Names, receiver: str) -> str:
    return f"{names.long(piece.source)} → {names.long(receiver)}"


def _who(address: str, names: Names) -> str:
    return f"{names.long(address)} had all of it"


def _box(arrival: Arrival, story: Story, names: Names) -> Box:
    kind = _kind(arrival)
    left = names.left(arrival.receiver)
    last = arrival.pieces[-1]
    if kind == "new":
        note = f"at {format_bytes(last.first)}"
    elif kind == "good":
        note = f"{arrival.stop - story.begin:.2f} s" + (", left" if left else "")
    elif arrival.status == "receiver left":
        note = "left"
    else:
        note = format_bytes(arrival.received)
    title = (
        f"{names.long(arrival.receiver)}: {arrival.status}, {arrival.received:,} bytes, "
        f"{arrival.stop - story.begin:.3f} s after the beginning"
    )
    if kind == "new":
        title += f"; from byte {last.first:,} on from {names.long(last.source)}"
    kind = "bad" if left else kind
    return Box(arrival.receiver, names.short(arrival.receiver), note, kind, title)


def _timeline(story: Story, names: Names, at: Mapping[str, tuple[float, float]]) -> Timeline:
    """Links as the tree has their receivers: sources mostly come before those that they feed."""
    spans: list[Span] = []
    for arrival in sorted(story.arrivals, key=lambda arrival: at[arrival.receiver]):
        for number, piece in enumerate(arrival.pieces):
            last = piece is arrival.pieces[-1]
            if number and piece.status in ("finished", "running"):
                kind = "new"
            elif last and piece.status == "running":
                kind = "run"
            else:
                kind = "good" if piece.status == "finished" else "bad"
            label = f"{names.short(piece.source)} → {names.short(arrival.receiver)}"
            spans.append(
                Span(
                    label,
                    _note(piece, number),
                    kind,
                    f"{_ends(piece, names, arrival.receiver)}: bytes {piece.first:,} to "
                    f"{piece.end:,} in {piece.seconds:.3f} s, {piece.status} ({piece.reason})",
                    piece.start - story.begin,
                    piece.stop - story.begin,
                    piece.waited,
                    len(spans) - 1 if number else None,
                )
            )
    return timeline(spans, story.seconds)


def _note(piece: Piece, number: int) -> str:
    rate = f"{format_bytes(int(piece.rate))}/s"
    if number:
        rate = f"from {format_bytes(piece.first)} on, {rate}"
    if piece.status == "receiver left":
        return piece.status  # how far it was, is not known exactly
    if piece.status not in ("finished", "running"):
        return f"{piece.status[:48]}, at {format_bytes(piece.end)}"
    return rate


# Reductions


def reduction(told: Mapping[str, Any], names: Names, now: float) -> dict[str, Any]:
    """What is to be shown of a reduction."""
    sums = told["sums"]
    stop = now if told["stop"] is None else told["stop"]
    added = told["contributors"] or len({key for one in _used(sums) for key in one["operands"]})
    facts = [
        (f"{added} of {told['operands']}", "operands in the result"),
        (str(len({one["worker"] for one in sums})), "workers took part"),
        (_time(stop - told["start"]), "in all"),
        (str(len(sums) - len(_used(sums))), "sums given up"),
    ]
    shown: dict[str, Any] = {"status": told["status"], "facts": facts, "tree": None, "time": None}
    if sums:
        shown["tree"] = _sums(sums, names)
        shown["time"] = _sums_over_time(sums, told["start"], stop, names)
    return shown


def _used(sums: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [one for one in sums if not one["status"].startswith("given up")]


def _sum_kind(one: Mapping[str, Any]) -> str:
    if one["status"].startswith("given up"):
        return "bad"
    return "good" if one["status"] == "finished" else "run"


def _sums(sums: Sequence[Mapping[str, Any]], names: Names) -> Picture:
    """The tree of a reduction, drawn from its leaves to the result. A ring is a line."""
    boxes = [
        Box(
            str(one["node"]),
            names.short(one["worker"]) + (" ★" if one["final"] and not one["ring"] else ""),
            f"{len(one['operands'])} of its own" if one["operands"] else "none of its own",
            _sum_kind(one),
            f"{names.long(one['worker'])}: {one['status']} ({one['reason']}); operands: "
            + (", ".join(map(str, one["operands"][:8])) or "none"),
        )
        for one in sums
    ]
    links = [
        Link(str(number), str(one["node"]), _sum_kind(one))
        for one in sums
        for number in one["sources"]
    ]
    if sums[0]["ring"]:
        nodes = [str(one["node"]) for one in sums if one["ring"]]
        links += [Link(a, b) for a, b in pairwise(nodes)]
    return tree(boxes, links)


def _sums_over_time(
    sums: Sequence[Mapping[str, Any]], start: float, stop: float, names: Names
) -> Timeline:
    by_number = {one["node"]: one for one in sums}

    def label(one: Mapping[str, Any]) -> str:
        sources = [by_number[number] for number in one["sources"] if number in by_number]
        before = " + ".join(names.short(source["worker"]) for source in sources[:3])
        more = f" + {len(sources) - 3} more" if len(sources) > 3 else ""
        arrow = " → " if before else ""
        return f"{before}{more}{arrow}{names.short(one['worker'])}"

    spans = [
        Span(
            label(one),
            one["status"][:60] if _sum_kind(one) == "bad" else "",
            _sum_kind(one),
            f"{names.long(one['worker'])}: {one['status']} ({one['reason']})",
            one["start"] - start,
            (stop if one["stop"] is None else one["stop"]) - start,
        )
        for one in sums
    ]
    return timeline(spans, stop - start)


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.1 else f"{seconds:.2f} s"
