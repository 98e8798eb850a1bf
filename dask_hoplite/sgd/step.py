"""What is told of each step, and what can go wrong in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distributed import Future

from dask_hoplite.exceptions import HopliteError


class TrainingError(HopliteError):
    """Training cannot go on. What it has reached is kept.

    Parameters
    ----------
    step : int
        The number of the step that could not be made.
    reason : str
        What stands in the way.
    """

    def __init__(self, step: int, reason: str):
        self.step = step
        self.reason = reason
        super().__init__(step, reason)

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}"


class GradientError(TrainingError):
    """A worker could not compute its contribution.

    Parameters
    ----------
    step : int
        The version of the parameters that it was given: how many steps had been applied.
    reason : str
        What was raised, or what is wrong with what was returned.
    worker : str
        The worker's address.
    part : str
        Key of the data that it worked on.
    """

    def __init__(self, step: int, reason: str, worker: str, part: str):
        super().__init__(step, reason)
        self.worker = worker
        self.part = part
        self.args = (step, reason, worker, part)

    def __str__(self) -> str:
        return f"step {self.step}, {self.worker}, data {self.part!r}: {self.reason}"


@dataclass(frozen=True)
class Step:
    """One step of a training.

    Parameters
    ----------
    number : int
        From 0.
    loss : float
        The mean of what the contributors' gradient functions gave as such, weighted as their
        gradients are; NaN if they gave none.
    contributors : tuple of str
        Addresses of the workers that contributed.
    staleness : tuple of int
        For each of them, how many steps were made while it computed: 0 if its parameters were the
        newest.
    nbytes : int
        Bytes of the parameters: what comes to the server as a sum, and leaves it as parameters.
    seconds : float
        Since the step before, or since the beginning.
    parameters : Future
        After this step. Without a server: those of one worker.
    """

    number: int
    loss: float
    contributors: tuple[str, ...]
    staleness: tuple[int, ...]
    nbytes: int
    seconds: float
    parameters: Future


@dataclass(frozen=True)
class Checkpoint:
    """All that is needed to go on later, perhaps on another cluster. Can be pickled.

    Parameters
    ----------
    step : int
        How many steps were made.
    parameters : object
        The parameters after those.
    memory : object
        What the rule remembers.
    """

    step: int
    parameters: Any
    memory: Any = None
