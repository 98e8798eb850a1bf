"""Configuration under the top-level key ``hoplite``, with the defaults that the package ships."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

logger = logging.getLogger(__name__)

with open(os.path.join(os.path.dirname(__file__), "hoplite.yaml")) as _file:
    DEFAULTS: dict[str, dict[str, Any]] = yaml.safe_load(_file)

dask.config.update_defaults(DEFAULTS)


def setting(name: str) -> Any:
    """What Dask's configuration says of ``hoplite.<name>``.

    The defaults are ours to know even where somebody has cleared Dask's configuration.
    """
    return dask.config.get(f"hoplite.{name}", DEFAULTS["hoplite"][name])


def parsed(name: str, value: object, parse: Callable[[Any], float], like: str) -> float:
    """A setting as a number.

    Raises
    ------
    ValueError
        If it is not one. Names the setting.
    """
    try:
        number = parse(value)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"hoplite.{name}: {value!r} is not a {like}")
    return number


def seconds(name: str, value: object) -> float:
    """A setting that is a time. A bare number is one of seconds."""
    return parsed(name, value, parse_timedelta, 'time, such as 1.5 or "1500 ms"')


def nbytes(name: str, value: object) -> int:
    """A setting that is a size. A bare number is one of bytes."""
    return int(parsed(name, value, parse_bytes, 'size, such as 524288 or "512 KiB"'))


def look_for_mistakes() -> None:
    """Say which settings there are none of."""
    given = dask.config.get("hoplite", {})
    if not isinstance(given, dict):
        logger.warning("The configuration of hoplite is not a mapping: %r is ignored", given)
        return
    known = DEFAULTS["hoplite"]
    for name in given:
        if str(name).replace("_", "-") not in known:
            near = get_close_matches(str(name), known, 1)
            hint = f"; is {near[0]} meant?" if near else ""
            logger.warning("There is no setting hoplite.%s%s", name, hint)


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
        look_for_mistakes()

        def chosen(name: str) -> Any:
            given = overrides.get(name)
            return setting(name.replace("_", "-")) if given is None else given

        config = cls(
            min_size=nbytes("min-size", chosen("min_size")),
            stall_timeout=seconds("stall-timeout", chosen("stall_timeout")),
            push_timeout=seconds("push-timeout", chosen("push_timeout")),
            history=int(parsed("history", chosen("history"), int, "whole number")),
        )
        if config.stall_timeout <= 0 or config.push_timeout <= 0:
            raise ValueError(f"hoplite: timeouts must be above zero: {config}")
        if config.min_size < 0 or config.history < 0:
            raise ValueError(f"hoplite: sizes must not be negative: {config}")
        return config
