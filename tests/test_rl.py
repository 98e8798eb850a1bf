"""Reinforcement learning: gradients, returns, actors, and that both ways of learning do learn."""

from __future__ import annotations

import math
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from dask_hoplite import rl
from dask_hoplite.rl import Options

MIB = 2**20
STEPS, N = 7, 3
UNBOUNDED = Options(steps=STEPS, entropy=0.1, trace=0.9, clip=math.inf)


def double(parameters):
    return {
        name: {key: array.astype(float) for key, array in layer.items()}
        for name, layer in parameters.items()
    }


def equal(a, b):
    return pickle.dumps(a) == pickle.dumps(b)


@pytest.fixture
def parameters():
    """Those of a small network, none of them zero, in double precision."""
    random = np.random.default_rng(0)
    parameters = double(rl.policy(hidden=5, seed=1))
    for layer in parameters.values():
        for array in layer.values():
            array += 0.3 * random.standard_normal(array.shape)
    return parameters


@pytest.fixture
def trajectory():
    """Steps of a made-up environment: one episode is terminated, another one only ended."""
    random = np.random.default_rng(2)
    terminated, played = np.zeros((STEPS, N), bool), np.ones((STEPS, N), bool)
    terminated[2, 0] = True
    played[3, 0] = played[4, 1] = False
    return {
        "observations": random.standard_normal((STEPS + 1, N, 4)),
        "actions": random.integers(0, 2, (STEPS, N)),
        "log_probs": np.log(random.uniform(0.2, 0.9, (STEPS, N))),
        "rewards": random.uniform(0, 50, (STEPS, N)),
        "terminated": terminated,
        "played": played,
    }


@pytest.fixture
def steps():
    """Values, rewards, discounts and ratios, with an episode's end in the middle."""
    random = np.random.default_rng(3)
    discounts = np.full((STEPS, N), 0.9)
    discounts[3, 1] = 0
    values, rewards = random.standard_normal((STEPS + 1, N)), random.standard_normal((STEPS, N))
    return values, rewards, discounts, random.uniform(0.1, 3, (STEPS, N))


def n_step_returns(values, rewards, discounts):
    """R_t = r_t + γ_t r_{t+1} + ... + γ_t ... γ_{T-1} V(x_T), as A3C's pseudocode has it."""
    returns, ahead = np.empty_like(rewards), values[-1]
    for t in reversed(range(len(rewards))):
        ahead = returns[t] = rewards[t] + discounts[t] * ahead
    return returns


# The network


@pytest.mark.parametrize("nbytes", [100_000, MIB, 8 * MIB, 16 * MIB])
def test_policies_are_of_the_size_that_is_asked_for(nbytes):
    arrays = [array for layer in rl.policy(nbytes=nbytes).values() for array in layer.values()]
    assert sum(array.nbytes for array in arrays) == pytest.approx(nbytes, rel=0.05)
    assert {array.dtype for array in arrays} == {np.dtype("f4")}


def test_policies_follow_from_their_seeds():
    assert equal(rl.policy(seed=3), rl.policy(seed=3))
    assert not equal(rl.policy(seed=3), rl.policy(seed=4))


def test_probabilities_and_values(parameters):
    log_probs, values, _ = rl.forward(parameters, np.ones((3, 2, 4)))
    assert log_probs.shape == (3, 2, 2) and values.shape == (3, 2)
    np.testing.assert_allclose(np.exp(log_probs).sum(axis=-1), 1)


@pytest.mark.parametrize("off_policy", [False, True])
def test_gradients_are_those_of_finite_differences(parameters, trajectory, off_policy):
    options, played, actions = UNBOUNDED, trajectory["played"], trajectory["actions"]

    def chosen(log_probs):
        return np.where(actions == 1, log_probs[:-1, :, 1], log_probs[:-1, :, 0])

    # Advantages and targets are constants.
    log_probs, values, _ = rl.forward(parameters, trajectory["observations"])
    discounts = options.discount * played * ~trajectory["terminated"]
    rewards = np.where(played, 0.01 * trajectory["rewards"], values[:-1])
    if off_policy:
        ratios = np.exp(chosen(log_probs) - trajectory["log_probs"])
        targets, gains = rl.vtrace(values, rewards, discounts, ratios, trace=options.trace)
    else:
        gains = rl.advantages(values, rewards, discounts, options.trace)
        targets = values[:-1] + gains

    def loss():
        log_probs, values, _ = rl.forward(parameters, trajectory["observations"])
        entropy = -(np.exp(log_probs) * log_probs).sum(axis=-1)[:-1]
        losses = (
            -gains * chosen(log_probs)
            + options.value * (targets - values[:-1]) ** 2 / 2
            - options.entropy * entropy
        )
        return losses[played].mean()

    gradient, told = rl.actor_critic_gradient(parameters, trajectory, options, off_policy)
    assert told == pytest.approx(loss())
    for name, layer in parameters.items():
        for key, array in layer.items():
            differences = np.empty_like(array)
            for i in np.ndindex(array.shape):
                kept = array[i]
                array[i] = kept + 1e-5
                above = loss()
                array[i] = kept - 1e-5
                differences[i] = (above - loss()) / 2e-5
                array[i] = kept
            found = gradient[name][key]
            np.testing.assert_allclose(found, differences, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("off_policy", [False, True])
def test_nothing_is_learned_between_episodes(parameters, trajectory, off_policy):
    gradient = partial(rl.actor_critic_gradient, options=UNBOUNDED, off_policy=off_policy)
    before = gradient(parameters, trajectory)
    for name in ("rewards", "actions"):
        changed = trajectory[name] + (name == "rewards")
        trajectory[name] = np.where(trajectory["played"], changed, 1)
    trajectory["rewards"][trajectory["played"]] -= 1
    after = gradient(parameters, trajectory)
    for name, layer in before[0].items():
        for key, array in layer.items():
            np.testing.assert_allclose(after[0][name][key], array, rtol=1e-6, atol=1e-12)


def test_gradients_are_clipped(parameters, trajectory):
    whole, _ = rl.actor_critic_gradient(parameters, trajectory, UNBOUNDED)
    short, _ = rl.actor_critic_gradient(parameters, trajectory, replace(UNBOUNDED, clip=0.01))
    arrays = [array for layer in short.values() for array in layer.values()]
    assert sum((array**2).sum() for array in arrays) == pytest.approx(0.01**2)
    ratio = whole["critic"]["weight"] / short["critic"]["weight"]
    np.testing.assert_allclose(ratio, ratio[0, 0])


# Returns


def test_advantages_are_of_n_step_returns(steps):
    values, rewards, discounts, _ = steps
    found = rl.advantages(values, rewards, discounts)
    np.testing.assert_allclose(found, n_step_returns(values, rewards, discounts) - values[:-1])
    one_step = rewards + discounts * values[1:] - values[:-1]
    np.testing.assert_allclose(rl.advantages(values, rewards, discounts, 0), one_step)


@pytest.mark.parametrize("max_rho, max_c, trace", [(1, 1, 1), (2, 0.5, 0.9), (math.inf, 3, 1)])
def test_vtrace_is_the_papers(steps, max_rho, max_c, trace):
    values, rewards, discounts, ratios = steps
    rho, c = np.minimum(max_rho, ratios), trace * np.minimum(max_c, ratios)
    slow = values.copy()
    for i in range(N):
        for s in range(STEPS):
            for t in range(s, STEPS):
                delta = rewards[t, i] + discounts[t, i] * values[t + 1, i] - values[t, i]
                weight = math.prod(discounts[j, i] * c[j, i] for j in range(s, t))
                slow[s, i] += weight * rho[t, i] * delta
    targets, gains = rl.vtrace(values, rewards, discounts, ratios, max_rho, max_c, trace)
    np.testing.assert_allclose(targets, slow[:-1])
    np.testing.assert_allclose(gains, rho * (rewards + discounts * slow[1:] - values[:-1]))


def test_vtrace_on_policy_is_n_step_returns(steps):
    values, rewards, discounts, ratios = steps
    targets, gains = rl.vtrace(values, rewards, discounts, np.ones_like(ratios))
    np.testing.assert_allclose(targets, n_step_returns(values, rewards, discounts))
    np.testing.assert_allclose(gains, targets - values[:-1])


# Steps


def test_adam(parameters):
    gradient = {n: {k: np.sign(a) * 7 for k, a in x.items()} for n, x in parameters.items()}
    memory = rl.adam_memory(parameters)
    before = pickle.dumps((parameters, gradient, memory))
    moved, after = rl.adam(parameters, gradient, memory, rate=0.01)
    again, _ = rl.adam(moved, gradient, after, rate=0.01)
    assert pickle.dumps((parameters, gradient, memory)) == before
    for name, layer in parameters.items():
        for key, array in layer.items():
            np.testing.assert_allclose(moved[name][key], array - 0.01 * np.sign(array), rtol=1e-4)
            np.testing.assert_allclose(again[name][key], array - 0.02 * np.sign(array), rtol=1e-4)


def test_matrices_of_wide_layers_move_less():
    parameters = rl.policy(hidden=256)
    moved, _ = rl.adam(parameters, parameters, rl.adam_memory(parameters), rate=0.01)
    steps = {
        name: np.median(abs(moved[name]["weight"] - layer["weight"]))
        for name, layer in parameters.items()
    }
    assert steps["first"] == pytest.approx(0.01, rel=0.01)
    assert steps["second"] == pytest.approx(0.0025, rel=0.01)


@pytest.mark.parametrize("rule", [rl.A3C(), rl.Impala(0.1, UNBOUNDED)])
def test_rules_are_pickled(rule):
    assert vars(pickle.loads(pickle.dumps(rule))) == vars(rule)


# Actors


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium")


def test_without_gymnasium_it_is_said_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install 'dask-hoplite\[rl\]'"):
        rl.Actor(0)


def test_actors_have_environments(gymnasium):
    with pytest.raises(ValueError, match="at least one environment"):
        rl.Actor(0, n_envs=0)


def test_actors_follow_from_their_seeds(gymnasium):
    play = partial(rl.rollout, rl.policy())
    one, same, other = rl.Actor(5), rl.Actor(5), rl.Actor(6)
    assert math.isnan(rl.mean_return(one))
    for _ in range(3):
        trajectory = play(one)
        assert equal(trajectory, play(same))
        assert not equal(trajectory, play(other))
    assert rl.mean_return(one) == rl.mean_return(same)


def test_actors_go_on_where_they_were_pickled(gymnasium):
    play = partial(rl.rollout, rl.policy())
    actor = rl.Actor(5)
    play(actor)
    copy = pickle.loads(pickle.dumps(actor))
    for _ in range(3):
        assert equal(play(actor), play(copy))
    assert list(actor.returns) == list(copy.returns)


def test_no_half_of_a_rollout_is_pickled(gymnasium):
    actor = rl.Actor(0)
    with ThreadPoolExecutor(1) as pool:
        with actor.lock:  # as a rollout has it
            pickled = pool.submit(pickle.dumps, actor)
            with pytest.raises(TimeoutError):
                pickled.result(timeout=0.2)
        assert pickle.loads(pickled.result()).steps == 0


def test_trajectories_are_of_whole_episodes(gymnasium):
    parameters, actor = rl.policy(), rl.Actor(1, n_envs=2)
    trajectory = rl.rollout(parameters, actor, Options(steps=200))
    shapes = {name: array.shape for name, array in trajectory.items()}
    assert shapes.pop("observations") == (201, 2, 4)
    assert set(shapes.values()) == {(200, 2)}

    returns = []
    for i in range(2):
        played = trajectory["played"][:, i]
        # A step is not played exactly where the one before has ended an episode.
        assert np.array_equal(~played[1:], trajectory["terminated"][:-1, i])
        first = trajectory["observations"][1:, i][~played]
        assert (abs(first) <= 0.05).all()
        (ends,) = np.nonzero(trajectory["terminated"][:, i])
        returns += [played[a:b].sum() for a, b in zip([0, *(ends + 1)], ends + 1, strict=False)]
    assert sorted(actor.returns) == sorted(returns)
    assert actor.episodes == len(returns) and actor.steps == trajectory["played"].sum()
    assert rl.mean_return(actor) == np.mean(returns)

    log_probs, _, _ = rl.forward(parameters, trajectory["observations"][:-1])
    chosen = np.take_along_axis(log_probs, trajectory["actions"][..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(chosen, trajectory["log_probs"], rtol=1e-5)


def test_an_episode_that_is_out_of_time_is_not_terminated(gymnasium):
    actor = rl.Actor(0, n_envs=1)
    environment = actor.environments[0]
    environment._elapsed_steps = 499
    _, terminated, _ = actor.step(np.array([0]))
    assert not terminated[0] and actor.ended[0] and actor.episodes == 1


def test_on_policy_both_ways_have_one_gradient(gymnasium):
    options = Options(trace=1.0)
    parameters = rl.policy()
    gradient, loss = rl.a3c_gradient(parameters, rl.Actor(0), options)
    trajectory = rl.rollout(parameters, rl.Actor(0), options)
    learners, same = rl.impala_gradient(parameters, [trajectory], options)
    assert loss == pytest.approx(same, rel=1e-4)
    for name, layer in gradient.items():
        for key, array in layer.items():
            np.testing.assert_allclose(learners[name][key], array, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("rule, work", [(rl.A3C(), rl.a3c_gradient), (rl.Impala(), rl.rollout)])
def test_learns(gymnasium, rule, work):
    """CartPole, with the first two of four actors at each step, whose weights may be old."""
    random = np.random.default_rng(0)
    parameters = rl.policy(seed=0)
    memory = rule.memory(parameters)
    actors = [rl.Actor(seed, window=20) for seed in range(4)]
    held = [parameters] * len(actors)
    for _ in range(150):
        first = random.permutation(len(actors))[:2]
        made = [work(held[i], actors[i]) for i in first]
        if not rule.gathers:
            gradients = [gradient for gradient, _ in made]
            made = {
                name: {key: sum(g[name][key] for g in gradients) for key in layer}
                for name, layer in parameters.items()
            }
        parameters, memory = rule.apply(parameters, made, memory, None)
        for i in first:
            held[i] = parameters
        reached = np.mean([rl.mean_return(actor) for actor in actors])
        if reached >= 195:  # of 80 episodes; actions by chance reach about 22
            break
    assert reached >= 195
