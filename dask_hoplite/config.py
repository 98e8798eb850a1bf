"""Configuration under the top-level key ``hoplite``, with the defaults that the package ships."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

with open(os.path.join(os.path.dirname(__file__), "hoplite.yaml")) as _file:
    DEFAULTS: dict[str, dict[str, Any]] = yaml.safe_load(_file)

dask.config.update_defaults(DEFAULTS)


def setting(name: str) -> Any:
    """What Dask's configuration says of ``hoplite.<name>``.

    The defaults are ours to know even where somebody has cleared Dask's configuration.
    """
    return dask.config.get(f"hoplite.{name}", DEFAULTS["hoplite"][name])


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

        def chosen(name: str) -> Any:
            given = overrides.get(name)
            return setting(name.replace("_", "-")) if given is None else given

        config = cls(
            min_size=parse_bytes(chosen("min_size")),
            stall_timeout=parse_timedelta(chosen("stall_timeout")),
            push_timeout=parse_timedelta(chosen("push_timeout")),
            history=int(chosen("history")),
        )
        if config.stall_timeout <= 0 or config.push_timeout <= 0:
            raise ValueError(f"hoplite: timeouts must be above zero: {config}")
        if config.min_size < 0 or config.history < 0:
            raise ValueError(f"hoplite: sizes must not be negative: {config}")
        return config
