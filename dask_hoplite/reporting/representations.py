"""What ``transfers()`` and ``status()`` return: a list and a dict that are good to look at."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from dask.utils import format_bytes, key_split

#: Rows that are shown; the latest ones.
SHOWN = 100


class Transfers(list[dict[str, Any]]):
    """A list of rows of transfers, shown as a table."""

    _header = ("key", "source", "receiver", "bytes", "from", "seconds", "status", "path")

    def __repr__(self) -> str:
        return _text(f"{_count(len(self), 'transfer')}", self._header, self._cells())

    def _repr_html_(self) -> str:
        return _html(f"{_count(len(self), 'transfer')}", self._header, self._cells())

    def _cells(self) -> list[list[str]]:
        return [
            [
                _short(row["key"]),
                str(row["source"] or ""),
                row["receiver"],
                _share(row["received"], row["nbytes"]),
                format_bytes(row["resumed_from"]) if row["resumed_from"] else "",
                "" if row["stop"] is None else f"{row['stop'] - row['start']:.2f}",
                row["status"],
                row["path"],
            ]
            for row in self[-SHOWN:]
        ]


class Status(dict[str, Any]):
    """A dict of what Hoplite is doing, shown as two tables."""

    _workers = ("worker", "in", "out", "whole", "receives")
    _objects = ("object", "bytes", "holders", "receiver", "source", "has", "because")

    def __repr__(self) -> str:
        return "\n\n".join(_text(*table) for table in self._tables())

    def _repr_html_(self) -> str:
        return "".join(_html(*table) for table in self._tables())

    def _tables(self) -> list[tuple[str, Sequence[str], list[list[str]]]]:
        workers, objects = self.get("workers", {}), self.get("objects", {})
        title = f"Hoplite {self.get('version', '')}: {_count(len(workers), 'worker')}"
        rows = [
            [
                address,
                format_bytes(worker["bytes_in"]),
                format_bytes(worker["bytes_out"]),
                str(len(worker["whole"])),
                str(len(worker["partial"])),
            ]
            for address, worker in workers.items()
        ]
        trees = [
            [
                _short(key),
                format_bytes(tree["nbytes"]),
                str(len(tree["holders"])),
                receiver,
                str(edge["source"] or ""),
                _share(edge["received"], tree["nbytes"]),
                edge["reason"],
            ]
            for key, tree in objects.items()
            for receiver, edge in tree["tree"].items()
        ]
        moving = f"{_count(sum(bool(tree['tree']) for tree in objects.values()), 'object')} moving"
        return [
            (title, self._workers, rows[-SHOWN:]),
            (moving, self._objects, trees[-SHOWN:]),
        ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def _share(received: int, nbytes: int) -> str:
    if received >= nbytes:
        return format_bytes(nbytes)
    return f"{format_bytes(received)} of {format_bytes(nbytes)}"


def _short(key: Any) -> str:
    """A key, without the end of a long token."""
    text = key if isinstance(key, str) else repr(key)
    if len(text) <= 32:
        return text
    name = key_split(key)
    tail = text[len(name) : len(name) + 9] if text.startswith(name) else ""
    return f"{name[:32]}{tail}…"


def _text(title: str, header: Sequence[str], rows: list[list[str]]) -> str:
    if not rows:
        return title
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, *rows)
    ]
    return "\n".join([title, *lines])


def _html(title: str, header: Sequence[str], rows: list[list[str]]) -> str:
    if not rows:
        return f"<p>{escape(title)}</p>"

    def line(cells: Sequence[str], tag: str) -> str:
        style = ' style="text-align: left"'
        return f"<tr>{''.join(f'<{tag}{style}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return (
        f"<p>{escape(title)}</p>"
        '<div style="max-height: 30em; overflow: auto">'
        f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table></div>"
    )
