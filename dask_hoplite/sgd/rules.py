"""Rules: how contributions of workers change the parameters.

To write one, subclass :class:`Rule` (there is a server that has the parameters) or
:class:`PeerRule` (each worker has its own). Most need one method:

>>> class Momentum(Rule):
...     def __init__(self, rate, decay=0.9):
...         self.rate, self.decay = rate, decay
...
...     def memory(self, parameters):
...         return tree_map(np.zeros_like, parameters)
...
...     def apply(self, parameters, total, memory, update):
...         memory = tree_map(lambda v, g: self.decay * v + g, memory, total)
...         return tree_map(lambda w, v: w - self.rate * v, parameters, memory), memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dask_hoplite.sgd.tree import tree_map

#: Gives a gradient, and, for reports, a loss (NaN if there is none)
Gradient = Callable[[Any, Any], tuple[Any, float]]


@dataclass(frozen=True)
class Update:
    """What a rule may want to know of the update that it makes.

    Parameters
    ----------
    step : int
        The number of the step, from 0.
    count : int
        How many contributions the total is of.
    weight : float
        The sum of their weights.
    """

    step: int
    count: int
    weight: float


class Rule:
    """Base of rules for a server. Objects of it are pickled; they have no state of their own."""

    #: Whether :meth:`apply` takes a list of contributions, in place of their sum.
    gathers = False

    def work(self, gradient: Gradient, parameters: Any, data: Any) -> tuple[Any, float]:
        """What a worker does: computes its contribution, and a loss.

        Parameters
        ----------
        gradient : callable of (parameters, data), giving (gradient, loss)
            The user's.
        parameters : nested arrays
            Must not be changed: others on this worker may have the same.
        data : object
            This worker's.

        Returns
        -------
        contribution : nested arrays
            Default: the gradient.
        loss : float
        """
        return gradient(parameters, data)

    def num_objects(self, workers: int) -> int:
        """How many contributions make a step, unless the user says."""
        return max(workers // 2, 1)

    def weight(self, staleness: int) -> float:
        """What a contribution is multiplied with before it is added to others."""
        return 1.0

    def applies(self, step: int) -> bool:
        """Whether parameters change at this step; otherwise its total is added to the next one."""
        return True

    def memory(self, parameters: Any) -> Any:
        """What is to be remembered from step to step, in the beginning; None for nothing."""
        return None

    def apply(self, parameters: Any, total: Any, memory: Any, update: Update) -> tuple[Any, Any]:
        """Make new parameters. Runs on the server.

        Parameters
        ----------
        parameters : nested arrays
            Must not be changed, but replaced.
        total : nested arrays, or list of those
            The weighted sum of contributions; all contributions if the rule ``gathers``.
        memory : object
            What was returned the last time.
        update : Update

        Returns
        -------
        parameters : nested arrays
            Of the same structure, shapes and dtypes.
        memory : object
        """
        raise NotImplementedError


class Sum(Rule):
    r"""The sum of the first k gradients: :math:`w \leftarrow w - \eta \sum_{i=1}^k g_i`.

    K-async SGD (S. Dutta et al., "Slow and stale gradients can win the race", AISTATS 2018, who
    divide by k; here that is a part of the rate).

    Parameters
    ----------
    rate : float
        :math:`\eta`.
    """

    def __init__(self, rate: float):
        self.rate = rate

    def apply(self, parameters: Any, total: Any, memory: Any, update: Update) -> tuple[Any, Any]:
        """Take a step along the sum."""
        return tree_map(lambda w, g: w - self.rate * g, parameters, total), memory


class Hybrid(Sum):
    r"""Several asynchronous sums are added up before they are applied:
    :math:`w \leftarrow w - \eta \sum_{j=1}^{m} \sum_{i=1}^k g_{ij}`.

    Workers go on with the parameters that they have meanwhile. Between asynchronous (m = 1) and
    synchronous (m·k = n) training: n-softsync (S. Gupta, W. Zhang and F. Wang, "Model accuracy and
    runtime tradeoff in distributed deep learning", ICDM 2016). With ``grows``, m grows by one each
    so many steps, since large sums pay towards the end.

    Parameters
    ----------
    rate : float
        :math:`\eta`.
    updates : int
        m, in the beginning.
    grows : int, optional
        Number of steps after which m is one more. Default: it stays.
    """

    def __init__(self, rate: float, updates: int = 2, grows: int | None = None):
        super().__init__(rate)
        if updates < 1 or (grows is not None and grows < 1):
            raise ValueError(f"numbers of steps are at least 1: updates={updates}, grows={grows}")
        self.updates = updates
        self.grows = grows

    def applies(self, step: int) -> bool:
        """Whether m sums are there."""
        if self.grows is None:
            return (step + 1) % self.updates == 0
        stage, since = divmod(step, self.grows)
        m = self.updates + stage
        return (since + 1) % m == 0 or since == self.grows - 1


class StalenessAdaptive(Sum):
    r"""Old gradients count less: :math:`w \leftarrow w - \eta \sum_i g_i / \max(1, \tau_i)^p`,
    where :math:`\tau_i` is the number of steps made since the parameters of :math:`g_i`.

    Staleness-aware asynchronous SGD (W. Zhang, S. Gupta, X. Lian and J. Liu, IJCAI 2016), with
    p = 1 there.

    Parameters
    ----------
    rate : float
        :math:`\eta`.
    power : float
        p.
    """

    def __init__(self, rate: float, power: float = 1.0):
        super().__init__(rate)
        self.power = power

    def weight(self, staleness: int) -> float:
        """How much a gradient counts."""
        return float(max(1, staleness) ** -self.power)


class DelayCompensated(Rule):
    r"""Gradients are corrected for what the parameters have changed since:
    :math:`w \leftarrow w - \eta \sum_i [g_i + \lambda\, g_i \odot g_i \odot (w - w_i)]`,
    where :math:`g_i` was computed at :math:`w_i`.

    DC-ASGD (S. Zheng et al., "Asynchronous stochastic gradient descent with delay compensation",
    ICML 2017). Since :math:`w` is the server's, workers send
    :math:`(g_i - \lambda g_i^2 w_i,\ \lambda g_i^2)`; sums of these are all that is needed. So it
    moves twice the bytes to the server, and as many as others from it.

    Parameters
    ----------
    rate : float
        :math:`\eta`.
    compensation : float
        :math:`\lambda`.
    """

    def __init__(self, rate: float, compensation: float = 0.04):
        self.rate = rate
        self.compensation = compensation

    def work(self, gradient: Gradient, parameters: Any, data: Any) -> tuple[Any, float]:
        """Compute the gradient, and how it changes with the parameters."""
        g, loss = gradient(parameters, data)
        curvature = tree_map(lambda g: self.compensation * g * g, g)
        at_zero = tree_map(lambda g, c, w: g - c * w, g, curvature, parameters)
        return (at_zero, curvature), loss

    def apply(self, parameters: Any, total: Any, memory: Any, update: Update) -> tuple[Any, Any]:
        """Take a step along the corrected sum."""
        at_zero, curvature = total
        step = lambda w, g, c: w - self.rate * (g + c * w)  # noqa: E731
        return tree_map(step, parameters, at_zero, curvature), memory


class PeerRule(Rule):
    """Base of rules without a server: workers average their parameters among themselves.

    :meth:`work` gives parameters in place of a gradient, and those that contribute to a step go on
    with the mean.
    """

    def num_objects(self, workers: int) -> int:
        """How many average with each other, unless the user says."""
        return workers


class LocalSteps(PeerRule):
    r"""Each worker makes K steps of its own, then all (or the first k) average:
    :math:`w_i \leftarrow w_i - \eta\, g_i(w_i)` K times, then
    :math:`w_i \leftarrow \frac1k \sum_j w_j`.

    K-step averaging (F. Zhou and G. Cong, IJCAI 2018).

    Parameters
    ----------
    rate : float
        :math:`\eta`.
    steps : int
        K.
    """

    def __init__(self, rate: float, steps: int = 4):
        if steps < 1:
            raise ValueError(f"there is at least one local step, not {steps}")
        self.rate = rate
        self.steps = steps

    def work(self, gradient: Gradient, parameters: Any, data: Any) -> tuple[Any, float]:
        """Make some steps."""
        losses = []
        for _ in range(self.steps):
            g, loss = gradient(parameters, data)
            parameters = tree_map(
                lambda w, g: (w - self.rate * g).astype(w.dtype, copy=False), parameters, g
            )
            losses.append(loss)
        return parameters, float(np.mean(losses))


class Gossip(LocalSteps):
    r"""Each worker makes a step of its own, then averages with whoever is ready next:
    :math:`w_i, w_j \leftarrow \frac12 (w_i + w_j)`.

    As AD-PSGD (X. Lian et al., ICML 2018) and GossipGraD (J. Daily et al., 2018) do, with partners
    by readiness, so that nobody waits for one that is slow. Pairs do not wait for each other.

    Parameters
    ----------
    rate : float
        :math:`\eta`.
    steps : int
        Steps before each average.
    """

    def __init__(self, rate: float, steps: int = 1):
        super().__init__(rate, steps)

    def num_objects(self, workers: int) -> int:
        """Pairs."""
        return 2
