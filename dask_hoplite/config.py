"""Configuration under the top-level key ``hoplite``, with the defaults that the package ships."""

from __future__ import annotations

import os
from dataclasses import dataclass

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

DEFAULTS = os.path.join(os.path.dirname(__file__), "hoplite.yaml")


def load_defaults() -> None:
    """Make our defaults known to Dask's configuration."""
    with open(DEFAULTS) as file:
        dask.config.update_defaults(yaml.safe_load(file))


@dataclass(frozen=True)
class Config:
    """The settings of one cluster, parsed. Bytes and seconds."""

    min_size: int
    stall_timeout: float
    push_timeout: float
    history: int

    @classmethod
    def read(cls, **overrides: object) -> Config:
        """Read Dask's configuration; what is given by name, and is not None, goes before it.

        Raises
        ------
        ValueError
            If a size or a time is not one, or is negative.
        """

        def setting(name: str) -> object:
            given = overrides.get(name)
            return dask.config.get(f"hoplite.{name.replace('_', '-')}") if given is None else given

        config = cls(
            min_size=parse_bytes(setting("min_size")),
            stall_timeout=parse_timedelta(setting("stall_timeout")),
            push_timeout=parse_timedelta(setting("push_timeout")),
            history=int(setting("history")),  # type: ignore[call-overload]
        )
        if config.stall_timeout <= 0 or config.push_timeout <= 0:
            raise ValueError(f"hoplite: timeouts must be above zero: {config}")
        if config.min_size < 0 or config.history < 0:
            raise ValueError(f"hoplite: sizes must not be negative: {config}")
        return config
