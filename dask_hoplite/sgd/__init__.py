"""Asynchronous data-parallel training on futures.

Workers compute gradients of their own data, each with the parameters that it has. A step takes the
first k that are ready, adds them up on their way to a server (:func:`dask_hoplite.reduce`), applies
a rule, and sends the new parameters to those that contributed, in a pipeline, while the others go
on. So about one object comes to the server at each step, and one leaves it, whatever the number of
workers, and nobody waits for one that is slow.

>>> training = sgd.train(gradient, parameters, data, sgd.Sum(0.1), steps=100)  # doctest: +SKIP
>>> for step in training:  # doctest: +SKIP
...     print(step.number, step.loss, step.staleness)
>>> training.parameters  # doctest: +SKIP
"""

from dask_hoplite.sgd.rules import (
    DelayCompensated,
    Gossip,
    Gradient,
    Hybrid,
    LocalSteps,
    PeerRule,
    Rule,
    StalenessAdaptive,
    Sum,
    Update,
)
from dask_hoplite.sgd.start import train
from dask_hoplite.sgd.step import Checkpoint, GradientError, Step, TrainingError
from dask_hoplite.sgd.training import Training
from dask_hoplite.sgd.tree import tree_map

__all__ = [
    "Checkpoint",
    "DelayCompensated",
    "Gossip",
    "Gradient",
    "GradientError",
    "Hybrid",
    "LocalSteps",
    "PeerRule",
    "Rule",
    "StalenessAdaptive",
    "Step",
    "Sum",
    "Training",
    "TrainingError",
    "Update",
    "train",
    "tree_map",
]
