"""What can go wrong, each with the names that one needs to act on it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from concurrent.futures import CancelledError


class HopliteError(Exception):
    """Base of all errors of this package."""


class NotInstalledError(HopliteError):
    """The cluster has no Hoplite, or one of another version, or Hoplite has stepped aside."""


class TransferError(HopliteError):
    """An object could not be brought to where it was wanted.

    Parameters
    ----------
    key : Key
        The object.
    reason : str
        What went wrong.
    tried : mapping of str to str, optional
        The sources that were tried, and how each failed.
    """

    def __init__(self, key: object, reason: str, tried: Mapping[str, str] | None = None):
        self.key = key
        self.reason = reason
        self.tried = dict(tried or {})
        super().__init__(key, reason, self.tried)

    def __str__(self) -> str:
        tried = "; ".join(f"{source}: {why}" for source, why in self.tried.items())
        return f"{self.key!r}: {self.reason}" + (f" ({tried})" if tried else "")


class ObjectLostError(TransferError, CancelledError):
    """No copy of the object is left, and nothing that it could be computed from.

    It is a :class:`concurrent.futures.CancelledError`, too, as what Dask raises in its place.
    """


class CancelledPullError(TransferError):
    """A worker was told to drop an object while it received it."""


class ObjectTooLargeError(TransferError):
    """No worker that was asked for may hold an object of this size."""


class _KeyedError(HopliteError):
    """A reason, and the key that it is about."""

    def __init__(self, key: object, reason: str):
        self.key = key
        self.reason = reason
        super().__init__(key, reason)

    def __str__(self) -> str:
        return f"{self.key!r}: {self.reason}"


class ReductionError(_KeyedError):
    """A reduction cannot have a result.

    Parameters
    ----------
    key : Key
        That of the result.
    reason : str
        What stands in the way.
    """


class EnsembleError(HopliteError):
    """Too few models of an ensemble have answered a query.

    Parameters
    ----------
    failed : mapping of hashable to str
        By name, why a model has not.
    count : int
        How many could have been in the answer.
    quorum : int
        How many it takes.
    """

    def __init__(self, failed: Mapping[Hashable, str], count: int, quorum: int):
        self.failed = dict(failed)
        self.count = count
        self.quorum = quorum
        super().__init__(self.failed, count, quorum)

    def __str__(self) -> str:
        why = "; ".join(f"{name!r}: {reason}" for name, reason in self.failed.items())
        return f"{self.count} models are left, and an answer takes {self.quorum}: {why}"


class ReportError(_KeyedError, ValueError):
    """There is nothing that a report could show of an object.

    Parameters
    ----------
    key : Key
        The object.
    reason : str
        Why not.
    """


class SourceFailedError(OSError):
    """One source failed; another one may do. Does not leave the package."""


class CorruptedError(SourceFailedError):
    """What came is not what was sent. Does not leave the package."""
