"""Asynchronous data-parallel training on futures.

Workers compute gradients of their own data, each with the parameters that it has. A step takes the
first k that are ready, adds them up on their way to a server (:func:`dask_hoplite.reduce`), applies
a rule, and sends the new parameters to those that contributed, in a pipeline, while the others go
on. So about one object comes to the server at each step, and one leaves it, whatever the number of
workers, and nobody waits for one that is slow.

>>> from dask_hoplite import sgd
>>> def gradient(w, data):  # of the squared error, and that, to be reported
...     x, y = data
...     return x.T @ (x @ w - y) / len(y), float(np.mean((x @ w - y) ** 2))
>>> def load(part):
...     x = np.random.default_rng(part).normal(size=(500, 10))
...     return x, x @ np.arange(10)
>>> data = client.map(load, range(3))
>>> training = sgd.train(gradient, np.zeros(10), data, sgd.Sum(0.3), num_objects=2, steps=40)
>>> losses = [step.loss for step in training]
>>> losses[-1] < losses[0] / 1000
True
>>> np.round(training.parameters).astype(int)
array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
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
