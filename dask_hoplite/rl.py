"""Reinforcement learning for :mod:`dask_hoplite.sgd`, on gymnasium's CartPole: A3C and IMPALA.

Everything here is NumPy, and follows from seeds. An actor-critic network is a nested dict of arrays
(:func:`policy`); an :class:`Actor` owns environments and stays on a worker. There are two ways to
learn from actors on many workers:

- as in A3C (Mnih et al. 2016, https://arxiv.org/abs/1602.01783), actors play and send gradients
  (:func:`a3c_gradient`), whose sum makes a step (:class:`A3C`);
- as in IMPALA (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561), actors play and send what
  they saw (:func:`rollout`), and a learner takes the gradient (:class:`Impala`), corrected for the
  weights that the actors played with being older than its own (:func:`vtrace`).
"""

from __future__ import annotations

import copy
import functools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dask.utils import SerializableLock

from dask_hoplite.sgd.rules import Rule, Update
from dask_hoplite.sgd.tree import tree_map

ENVIRONMENT = "CartPole-v1"
OBSERVATIONS, ACTIONS = 4, 2

#: About the largest position, velocity, angle and angular velocity that are seen
SCALE = np.array([2.4, 2.0, 0.2, 2.0], np.float32)

#: Layers by name, each with its ``weight`` (inputs, outputs) and its ``bias`` (outputs,)
Parameters = dict[str, dict[str, np.ndarray]]

#: Arrays by name, as :func:`rollout` describes them
Trajectory = dict[str, np.ndarray]

#: The state of :func:`adam`
Memory = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What both ways of learning may be told.

    Attributes
    ----------
    steps : int
        Steps that each environment takes in one rollout.
    discount : float
        γ, by which a reward is worth less for each step that it is away.
    trace : float
        λ, the weight of longer returns: of generalised advantage estimates in A3C, and of c in
        IMPALA. With 1 these are n-step returns.
    value, entropy : float
        Weights of the loss of values, and of the entropy's bonus.
    clip : float
        The norm that a gradient may have.
    max_rho, max_c : float
        ρ̄ and c̄, where IMPALA truncates importance weights.
    """

    steps: int = 32
    discount: float = 0.99
    trace: float = 0.95
    value: float = 0.5
    entropy: float = 0.001
    clip: float = 0.5
    max_rho: float = 1.0
    max_c: float = 1.0


DEFAULT = Options()


# The network


def policy(hidden: int = 64, nbytes: int | None = None, seed: int = 0) -> Parameters:
    """Parameters of an actor and a critic that share two hidden layers.

    Parameters
    ----------
    hidden : int
        Units of each hidden layer.
    nbytes : int, optional
        About how many bytes all parameters are to have. The layers are as wide as it takes.
    seed : int
        Parameters of one seed are equal.

    Returns
    -------
    parameters : dict of dict of numpy.ndarray
        Of float32, ``{"first": {"weight": (4, hidden), "bias": (hidden,)}, "second": ...,
        "actor": ..., "critic": ...}``.
    """
    if nbytes is not None:
        # There are hidden² + 2 b hidden + (ACTIONS + 1) parameters.
        b = (OBSERVATIONS + 2 + ACTIONS + 1) / 2
        hidden = max(1, round(math.sqrt(max(0, b**2 + nbytes / 4 - ACTIONS - 1)) - b))
    random = np.random.default_rng(seed)

    def layer(inputs: int, outputs: int, gain: float) -> dict[str, np.ndarray]:
        weight = random.standard_normal((inputs, outputs), np.float32)
        weight *= np.float32(gain / math.sqrt(inputs))
        return {"weight": weight, "bias": np.zeros(outputs, np.float32)}

    return {
        "first": layer(OBSERVATIONS, hidden, 1.0),
        "second": layer(hidden, hidden, 1.0),
        "actor": layer(hidden, ACTIONS, 0.01),  # at first, all actions are about as likely
        "critic": layer(hidden, 1, 0.1),
    }


def forward(
    parameters: Parameters, observations: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """What the network makes of observations.

    Parameters
    ----------
    parameters : dict of dict of numpy.ndarray
        As of :func:`policy`. Calculations are in their precision.
    observations : numpy.ndarray, (..., 4)

    Returns
    -------
    log_probs : numpy.ndarray, (..., 2)
        log π(a|x) of all actions.
    values : numpy.ndarray, (...)
        V(x).
    activations : list of numpy.ndarray
        The input of each layer, for :func:`backward`.
    """
    first, second, actor, critic = (
        parameters[name] for name in ("first", "second", "actor", "critic")
    )
    x = (observations / SCALE).reshape(-1, OBSERVATIONS).astype(first["weight"].dtype, copy=False)
    h1 = np.tanh(x @ first["weight"] + first["bias"])
    h2 = np.tanh(h1 @ second["weight"] + second["bias"])
    logits = h2 @ actor["weight"] + actor["bias"]
    logits -= logits.max(axis=-1, keepdims=True)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    values = h2 @ critic["weight"] + critic["bias"]
    shape = observations.shape[:-1]
    return log_probs.reshape(*shape, ACTIONS), values.reshape(shape), [x, h1, h2]


def backward(
    parameters: Parameters,
    activations: list[np.ndarray],
    logits: np.ndarray,
    values: np.ndarray,
) -> Parameters:
    """The gradient of a loss by parameters, from those by what :func:`forward` returned.

    Parameters
    ----------
    parameters : dict of dict of numpy.ndarray
    activations : list of numpy.ndarray
        Of :func:`forward`.
    logits : numpy.ndarray, (..., 2)
        The gradient by logits (log-probabilities before they are normalised).
    values : numpy.ndarray, (...)
        The gradient by values.

    Returns
    -------
    gradient : dict of dict of numpy.ndarray
        Of the structure and precision of `parameters`.
    """
    x, h1, h2 = activations
    dtype = x.dtype
    d_actor = logits.reshape(-1, ACTIONS).astype(dtype, copy=False)
    d_critic = values.reshape(-1, 1).astype(dtype, copy=False)
    d2 = d_actor @ parameters["actor"]["weight"].T + d_critic @ parameters["critic"]["weight"].T
    d2 *= 1 - h2**2
    d1 = d2 @ parameters["second"]["weight"].T
    d1 *= 1 - h1**2
    errors = {
        "first": (x, d1),
        "second": (h1, d2),
        "actor": (h2, d_actor),
        "critic": (h2, d_critic),
    }
    return {
        name: {"weight": inputs.T @ error, "bias": error.sum(axis=0)}
        for name, (inputs, error) in errors.items()
    }


# Actors


def make_environment() -> Any:
    """An environment of gymnasium, which needs not be installed for anything else."""
    try:
        import gymnasium
    except ImportError as e:
        raise ImportError(f"{ENVIRONMENT} needs gymnasium: pip install 'dask-hoplite[rl]'") from e
    return gymnasium.make(ENVIRONMENT, disable_env_checker=True)


class Actor:
    """Environments, and where they are.

    It is made on a worker and stays there (``client.submit(Actor, seed, pure=False)``, which is a
    new one each time); tasks on that worker change it in place. One that is lost with its worker
    and made anew from its seed begins from the start.

    Parameters
    ----------
    seed : int
        Of the environments, and of the choice of actions.
    n_envs : int
        Environments that take their steps together, since a product of matrices costs about as much
        for several rows as for one.
    window : int
        How many of the latest episodes :func:`mean_return` is of.

    Attributes
    ----------
    steps, episodes : int
        Steps taken, and episodes that ended, in all environments.
    returns : collections.deque of float
        Of the latest episodes.
    """

    def __init__(self, seed: int, n_envs: int = 8, window: int = 100):
        if n_envs < 1:
            raise ValueError(f"An actor needs at least one environment, not {n_envs}")
        seeds = np.random.SeedSequence(seed).generate_state(n_envs + 1)
        self.random = np.random.default_rng(seeds[-1])
        self.environments = [make_environment() for _ in range(n_envs)]
        pairs = zip(self.environments, seeds, strict=False)
        self.observations = np.stack([env.reset(seed=int(seed))[0] for env, seed in pairs])
        self.ended = np.zeros(n_envs, bool)
        self.scores = np.zeros(n_envs)
        self.returns: deque[float] = deque(maxlen=window)
        self.steps = self.episodes = 0
        #: Tasks of one worker may run at the same time.
        self.lock = SerializableLock()

    def __getstate__(self) -> dict[str, Any]:
        # What is pickled is a copy, since a task may play on meanwhile; and no half of a rollout.
        with self.lock:
            state = {name: value for name, value in vars(self).items() if name != "lock"}
            return copy.deepcopy(state)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=SerializableLock())

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a step in each environment; where an episode has ended, begin the next one instead.

        Parameters
        ----------
        actions : numpy.ndarray of int, (n_envs,)

        Returns
        -------
        rewards : numpy.ndarray of float32, (n_envs,)
        terminated : numpy.ndarray of bool, (n_envs,)
            Whether the pole fell. An episode that took its 500 steps is ended, but not terminated.
        played : numpy.ndarray of bool, (n_envs,)
            False where this was no step, but the beginning of an episode.
        """
        n = len(self.environments)
        rewards, terminated, played = np.zeros(n, np.float32), np.zeros(n, bool), ~self.ended
        for i, (environment, action) in enumerate(zip(self.environments, actions, strict=True)):
            if self.ended[i]:
                self.observations[i], self.ended[i] = environment.reset()[0], False
                continue
            observation, reward, terminated[i], truncated, _ = environment.step(int(action))
            self.observations[i], rewards[i] = observation, reward
            self.scores[i] += reward
            if terminated[i] or truncated:
                self.ended[i] = True
                self.returns.append(float(self.scores[i]))
                self.scores[i] = 0
                self.episodes += 1
        self.steps += int(played.sum())
        return rewards, terminated, played


def mean_return(actor: Actor) -> float:
    """The mean return of an actor's latest episodes; NaN before the first one has ended."""
    with actor.lock:
        return float(np.mean(actor.returns)) if actor.returns else math.nan


def rollout(parameters: Parameters, actor: Actor, options: Options = DEFAULT) -> Trajectory:
    """Let an actor play on from where it is. This is the contribution of an actor in IMPALA.

    Parameters
    ----------
    parameters : dict of dict of numpy.ndarray
        Of the behaviour policy μ.
    actor : Actor
        It is changed.
    options : Options
        Of which ``steps`` is T.

    Returns
    -------
    trajectory : dict of numpy.ndarray
        ``observations`` (T + 1, n, 4), of which the last are those after the last step; ``actions``
        (T, n); ``log_probs`` (T, n), log μ(a|x); ``rewards`` (T, n); ``terminated`` (T, n);
        ``played`` (T, n). The observation after the last one of an episode is the first one of the
        next episode, and the step between them, which is not played, counts for nothing.
    """
    rows: dict[str, list[np.ndarray]] = {
        name: []
        for name in ("observations", "actions", "log_probs", "rewards", "terminated", "played")
    }
    with actor.lock:
        for _ in range(options.steps):
            observations = actor.observations.copy()
            log_probs, _, _ = forward(parameters, observations)
            # The action at which the distribution function passes a random number
            chance = actor.random.random((len(observations), 1))
            passed = np.exp(log_probs).cumsum(axis=-1)[:, :-1] < chance
            actions = passed.sum(axis=-1)
            chosen = np.take_along_axis(log_probs, actions[:, None], axis=-1)[:, 0]
            row = (observations, actions, chosen, *actor.step(actions))
            for values, value in zip(rows.values(), row, strict=True):
                values.append(value)
        rows["observations"].append(actor.observations.copy())
    return {name: np.stack(values) for name, values in rows.items()}


# Returns


def accumulate(deltas: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Sums from the end: x_t = deltas_t + factors_t x_{t+1}, of arrays (T, n)."""
    sums = np.zeros_like(deltas)
    ahead = np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        ahead = sums[t] = deltas[t] + factors[t] * ahead
    return sums


def advantages(
    values: np.ndarray, rewards: np.ndarray, discounts: np.ndarray, trace: float = 1.0
) -> np.ndarray:
    """Generalised advantage estimates (Schulman et al. 2016, https://arxiv.org/abs/1506.02438).

    A_t = δ_t + γ_t λ A_{t+1}, where δ_t = r_t + γ_t V(x_{t+1}) - V(x_t). With λ = 1, A_t + V(x_t)
    is the n-step return of A3C, r_t + γ_t r_{t+1} + ... + γ_t ... γ_{T-1} V(x_T).

    Parameters
    ----------
    values : numpy.ndarray, (T + 1, n)
    rewards : numpy.ndarray, (T, n)
    discounts : numpy.ndarray, (T, n)
        γ_t, which is 0 where an episode ends with the step.
    trace : float
        λ.

    Returns
    -------
    advantages : numpy.ndarray, (T, n)
    """
    deltas = rewards + discounts * values[1:] - values[:-1]
    return accumulate(deltas, discounts * trace)


def vtrace(
    values: np.ndarray,
    rewards: np.ndarray,
    discounts: np.ndarray,
    ratios: np.ndarray,
    max_rho: float = 1.0,
    max_c: float = 1.0,
    trace: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """V-trace targets and advantages (Espeholt et al. 2018, equations 1 and 4).

    v_s = V(x_s) + Σ_{t=s}^{T-1} γ_s ... γ_{t-1} c_s ... c_{t-1} ρ_t δ_t, where
    δ_t = r_t + γ_t V(x_{t+1}) - V(x_t), ρ_t = min(ρ̄, π/μ), c_t = λ min(c̄, π/μ). The policy's
    gradient is that of log π(a_s|x_s) times ρ_s (r_s + γ_s v_{s+1} - V(x_s)).

    Parameters
    ----------
    values : numpy.ndarray, (T + 1, n)
        V(x) of the learner.
    rewards, discounts : numpy.ndarray, (T, n)
        As of :func:`advantages`.
    ratios : numpy.ndarray, (T, n)
        π(a|x) / μ(a|x), of the learner's policy and the one that was played.
    max_rho, max_c, trace : float
        ρ̄, c̄ and λ.

    Returns
    -------
    targets : numpy.ndarray, (T, n)
        v_s.
    advantages : numpy.ndarray, (T, n)
        ρ_s (r_s + γ_s v_{s+1} - V(x_s)).
    """
    rhos, cs = np.minimum(max_rho, ratios), trace * np.minimum(max_c, ratios)
    deltas = rhos * (rewards + discounts * values[1:] - values[:-1])
    targets = values[:-1] + accumulate(deltas, discounts * cs)
    ahead = np.concatenate([targets[1:], values[-1:]])
    return targets, rhos * (rewards + discounts * ahead - values[:-1])


# Gradients


def actor_critic_gradient(
    parameters: Parameters,
    trajectory: Trajectory,
    options: Options,
    off_policy: bool = False,
) -> tuple[Parameters, float]:
    """The gradient of the loss of an actor-critic on a trajectory.

    The loss is the mean over steps of -A log π(a|x) + value (R - V(x))² / 2 - entropy H(π(.|x)),
    where advantages A and returns R are constants, of :func:`advantages`, or, if the trajectory is
    of another policy, of :func:`vtrace`.

    Parameters
    ----------
    parameters : dict of dict of numpy.ndarray
    trajectory : dict of numpy.ndarray
        Of :func:`rollout`.
    options : Options
    off_policy : bool
        Whether it is of another policy.

    Returns
    -------
    gradient : dict of dict of numpy.ndarray
        As `parameters`. Its norm is at most ``options.clip``.
    loss : float
    """
    played = trajectory["played"]
    actions = trajectory["actions"][..., None]
    log_probs, values, activations = forward(parameters, trajectory["observations"])
    log_probs, last = log_probs[:-1], np.zeros_like(values[-1:])
    chosen = np.take_along_axis(log_probs, actions, axis=-1)[..., 0]
    dtype = values.dtype
    discounts = (options.discount * (played & ~trajectory["terminated"])).astype(dtype)
    # Values are not to be much larger than 1, or their loss is all that the network learns from.
    rewards = (1 - options.discount) * trajectory["rewards"].astype(dtype)
    rewards = np.where(played, rewards, values[:-1])  # nothing is learned where it brings just V
    if off_policy:
        ratios = np.exp(chosen - trajectory["log_probs"])
        limits = options.max_rho, options.max_c, options.trace
        targets, gains = vtrace(values, rewards, discounts, ratios, *limits)
        misses = values[:-1] - targets
    else:
        gains = advantages(values, rewards, discounts, options.trace)
        misses = -gains
    share = (played / max(1, played.sum())).astype(dtype)
    probs = np.exp(log_probs)
    entropy = -(probs * log_probs).sum(axis=-1)
    losses = -gains * chosen + options.value * misses**2 / 2 - options.entropy * entropy
    # By logits, the gradient of -log π(a) is π - 1_a, that of -H is π (log π + H).
    by_logits = gains[..., None] * (probs - (np.arange(ACTIONS) == actions))
    by_logits += options.entropy * probs * (log_probs + entropy[..., None])
    by_logits *= share[..., None]
    by_values = options.value * misses * share
    gradient = backward(
        parameters,
        activations,
        np.concatenate([by_logits, np.zeros_like(by_logits[:1])]),
        np.concatenate([by_values, last]),
    )
    return clipped(gradient, options.clip), float((share * losses).sum())


def clipped(gradient: Parameters, norm: float) -> Parameters:
    """A gradient of at most some norm, min(1, norm / |g|) g."""
    arrays = [array for layer in gradient.values() for array in layer.values()]
    size = math.sqrt(sum(float(np.vdot(array, array)) for array in arrays))
    if size > norm:
        for array in arrays:
            array *= norm / size
    return gradient


def a3c_gradient(
    parameters: Parameters, actor: Actor, options: Options = DEFAULT
) -> tuple[Parameters, float]:
    """Let an actor play on, and take the gradient there. This is its contribution in A3C.

    Parameters
    ----------
    parameters : dict of dict of numpy.ndarray
    actor : Actor
        It is changed.
    options : Options

    Returns
    -------
    gradient : dict of dict of numpy.ndarray
        As `parameters`, and of about as many bytes.
    loss : float
        That of :func:`actor_critic_gradient`, which says little of how well the actor plays:
        see :func:`mean_return`.
    """
    return actor_critic_gradient(parameters, rollout(parameters, actor, options), options)


def impala_gradient(
    parameters: Parameters, trajectories: Sequence[Trajectory], options: Options = DEFAULT
) -> tuple[Parameters, float]:
    """A learner's gradient on what actors saw, corrected for their other weights.

    Parameters
    ----------
    parameters : dict of dict of numpy.ndarray
        The learner's.
    trajectories : sequence of dict of numpy.ndarray
        Of :func:`rollout`, all of the same number of steps.
    options : Options

    Returns
    -------
    gradient : dict of dict of numpy.ndarray
    loss : float
    """
    batch = {
        name: np.concatenate([trajectory[name] for trajectory in trajectories], axis=1)
        for name in trajectories[0]
    }
    return actor_critic_gradient(parameters, batch, options, off_policy=True)


# Steps


def adam_memory(parameters: Parameters) -> Memory:
    """What :func:`adam` remembers, before its first step."""
    zeros = functools.partial(tree_map, np.zeros_like, parameters)
    return {"count": 0, "mean": zeros(), "square": zeros()}


def adam(
    parameters: Parameters,
    gradient: Parameters,
    memory: Memory,
    rate: float = 1e-3,
    beta1: float = 0.9,
    beta2: float = 0.99,
    epsilon: float = 1e-5,
) -> tuple[Parameters, Memory]:
    """A step of Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980).

    m ← β₁ m + (1 - β₁) g, s ← β₂ s + (1 - β₂) g², w ← w - η m̂ / (√ŝ + ε), where m̂ = m / (1 - β₁ᵗ)
    and ŝ = s / (1 - β₂ᵗ) at step t. It hardly depends on the scale of gradients, so their sum is as
    good as their mean.

    The rate of a matrix of more than 64 inputs is η 64 / inputs, so that one rate is right for
    layers of any width (Yang et al. 2021, https://arxiv.org/abs/2203.03466).

    Parameters
    ----------
    parameters, gradient : nested dict of numpy.ndarray
        Of one structure. They stay as they are.
    memory : dict
        Of :func:`adam_memory`, or of the step before. It stays as it is.
    rate : float
        η.
    beta1, beta2, epsilon : float
        With a shorter memory than the paper's (β₂ = 0.999), since gradients shrink as the policy
        gets better.

    Returns
    -------
    parameters : nested dict of numpy.ndarray
    memory : dict
    """
    count = memory["count"] + 1
    mean = tree_map(lambda m, g: beta1 * m + (1 - beta1) * g, memory["mean"], gradient)
    square = tree_map(lambda s, g: beta2 * s + (1 - beta2) * g * g, memory["square"], gradient)
    eta, spread = rate / (1 - beta1**count), 1 / math.sqrt(1 - beta2**count)

    def moved(w: np.ndarray, m: np.ndarray, s: np.ndarray) -> np.ndarray:
        share = min(1.0, 64 / len(w)) if w.ndim == 2 else 1.0
        return w - share * eta * m / (spread * np.sqrt(s) + epsilon)

    memory = {"count": count, "mean": mean, "square": square}
    return tree_map(moved, parameters, mean, square), memory


def impala_update(
    parameters: Parameters,
    trajectories: Sequence[Trajectory],
    memory: Memory,
    rate: float = 1e-3,
    options: Options = DEFAULT,
) -> tuple[Parameters, Memory]:
    """A learner's step: :func:`adam` along the :func:`impala_gradient` of some trajectories."""
    gradient, _ = impala_gradient(parameters, trajectories, options)
    return adam(parameters, gradient, memory, rate)


class A3C(Rule):
    """Actors send gradients, and Adam takes a step along the sum of those that are there first.

    A3C (Mnih et al. 2016), with Adam in place of RMSProp:
    ``sgd.train(rl.a3c_gradient, rl.policy(), actors, rl.A3C())``.

    Parameters
    ----------
    rate : float
        η of :func:`adam`.
    """

    def __init__(self, rate: float = 1e-3):
        self.rate = rate

    def memory(self, parameters: Parameters) -> Memory:
        """Remember moments of the gradient."""
        return adam_memory(parameters)

    def apply(
        self, parameters: Parameters, total: Parameters, memory: Memory, update: Update
    ) -> tuple[Parameters, Memory]:
        """Take a step along the sum."""
        return adam(parameters, total, memory, self.rate)


class Impala(Rule):
    """Actors send trajectories, and the server learns from those that are there first.

    IMPALA (Espeholt et al. 2018), with Adam in place of RMSProp:
    ``sgd.train(rl.rollout, rl.policy(), actors, rl.Impala())``.

    Parameters
    ----------
    rate : float
        η of :func:`adam`.
    options : Options
        Of the learner.
    """

    gathers = True

    def __init__(self, rate: float = 1e-3, options: Options = DEFAULT):
        self.rate = rate
        self.options = options

    def memory(self, parameters: Parameters) -> Memory:
        """Remember moments of the gradient."""
        return adam_memory(parameters)

    def apply(
        self, parameters: Parameters, total: list[Trajectory], memory: Memory, update: Update
    ) -> tuple[Parameters, Memory]:
        """Learn from what was gathered."""
        return impala_update(parameters, total, memory, self.rate, self.options)
