"""What runs on workers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from distributed import get_worker

from dask_hoplite.collectives.operands import OperandError, flatten
from dask_hoplite.sgd.rules import Rule, Update
from dask_hoplite.sgd.step import GradientError
from dask_hoplite.sgd.tree import tree_map


@dataclass(frozen=True)
class Job:
    """What workers compute.

    Parameters
    ----------
    rule : Rule
    gradient : callable
        The user's.
    check : bool
        Whether what it returns is looked at.
    """

    rule: Rule
    gradient: Callable[..., Any]
    check: bool = True


def contribution(
    job: Job, parameters: Any, data: Any, step: int, part: str, seed: int, nested: bool = False
) -> tuple[Any, float, float]:
    """What one worker contributes.

    Returns
    -------
    contribution : nested arrays
    loss : float
    weight : float
        One. Where contributions are weighted, so is this, and the loss; their sums tell the mean.

    Raises
    ------
    GradientError
        Whatever goes wrong.
    """
    if nested:  # what peers have averaged is what they have contributed
        parameters = parameters[0]
    more = {"seed": seed} if _takes_seed(job.gradient) else {}

    def gradient(parameters: Any, data: Any) -> tuple[Any, float]:
        value, loss = _split(job.gradient(parameters, data, **more), parameters, job.rule)
        if "seed" in more:
            more["seed"] += 1
        if job.check and not job.rule.gathers:
            _check(value, parameters)
        return value, loss

    try:
        value, loss = job.rule.work(gradient, parameters, data)
        return value, loss, 1.0
    except Exception as error:
        reason = str(error) if isinstance(error, _Unfit) else f"{type(error).__name__}: {error}"
        raise GradientError(step, reason, get_worker().address, part) from error


def _takes_seed(function: Callable[..., Any]) -> bool:
    try:
        return "seed" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # it does not say
        return False


class _Unfit(Exception):
    """What the user's function returned is no gradient. Leaves nobody."""


def _split(result: Any, parameters: Any, rule: Rule) -> tuple[Any, float]:
    """A gradient, and the loss that came with it, perhaps."""
    if not (isinstance(result, tuple) and len(result) == 2):
        return result, float("nan")
    # Parameters may be a pair themselves
    if not rule.gathers and isinstance(parameters, tuple) and _alike(result, parameters):
        return result, float("nan")
    value, loss = result
    try:
        return value, float(loss)
    except (TypeError, ValueError):
        return result, float("nan")


def _alike(value: Any, parameters: Any) -> bool:
    try:
        return flatten(parameters)[0].differs(flatten(value)[0]) is None
    except OperandError:
        return False


def _check(value: Any, parameters: Any) -> None:
    """See whether a gradient is one."""
    try:
        theirs, arrays = flatten(value)
    except OperandError as error:
        raise _Unfit(f"it returned no gradient: {error}") from error
    ours, _ = flatten(parameters)
    if (how := ours.differs(theirs)) is not None:
        raise _Unfit(f"the gradient (second) does not go with the parameters (first): {how}")
    for path, array in zip(theirs.paths, arrays, strict=True):
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            raise _Unfit(f"the gradient {path or 'array'} has NaN or infinite values")


def begin(rule: Rule, parameters: Any) -> Any:
    """What the rule is to remember, in the beginning."""
    return rule.memory(parameters)


def add(first: Any, *others: Any) -> Any:
    """Add up totals that are applied together."""
    return tree_map(lambda *arrays: sum(arrays[1:], arrays[0]), first, *others)


def update(rule: Rule, step: int, count: int, parameters: Any, memory: Any, *totals: Any) -> Any:
    """New parameters, on the server; with what the rule remembers, if it does."""
    if rule.gathers:
        value: Any = [total[0] for total in totals]
        weight = float(len(totals))
    else:
        [(value, _, weight)] = totals
    new, remembered = rule.apply(parameters, value, memory, Update(step, count, float(weight)))
    if not rule.gathers:
        new = tree_map(lambda w, n: n.astype(w.dtype, copy=False), parameters, new)
    return new if memory is None else (new, remembered)


def report(*totals: Any) -> float:
    """The mean loss of what went in."""
    weight = sum(float(total[2]) for total in totals)
    return sum(float(total[1]) for total in totals) / weight if weight else float("nan")


def item(pair: tuple[Any, ...], index: int) -> Any:
    """One of several results of a task."""
    return pair[index]
