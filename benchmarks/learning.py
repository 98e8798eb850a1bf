"""Whether asynchronous training learns as much as synchronous training does.

A network of one hidden layer learns to read scikit-learn's digits. The synchronous run takes the
gradients of all workers at each step; the asynchronous ones those of the first half of them, and
twice as many steps, so that all see as many samples. One worker is slower than others.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from distributed import Client, LocalCluster, wait
from sklearn.datasets import load_digits

from dask_hoplite import Hoplite, sgd
from dask_hoplite.bench.workloads import workers_of

#: Gradients that a run takes in, samples of each, and units of the hidden layer.
GRADIENTS, BATCH, HIDDEN = 480, 64, 32

RATE = 0.5

Parameters = dict[str, np.ndarray]


def digits(part: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Every so many of the first 1,500 digits: pixels from 0 to 1, and what they show."""
    pixels, labels = load_digits(return_X_y=True)
    return pixels[part:1500:parts] / 16, labels[part:1500:parts]


def unseen() -> tuple[np.ndarray, np.ndarray]:
    """The other 297."""
    pixels, labels = load_digits(return_X_y=True)
    return pixels[1500:] / 16, labels[1500:]


def network(seed: int) -> Parameters:
    """A network that has learnt nothing yet."""
    rng = np.random.default_rng(seed)
    return {
        "hidden": rng.normal(0, 1 / 8, (64, HIDDEN)),
        "bias": np.zeros(HIDDEN),
        "out": rng.normal(0, 1 / np.sqrt(HIDDEN), (HIDDEN, 10)),
    }


def forward(parameters: Parameters, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Activations of the hidden layer, and what it takes a digit for, with probabilities."""
    hidden = np.maximum(pixels @ parameters["hidden"] + parameters["bias"], 0)
    logits = hidden @ parameters["out"]
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, odds / odds.sum(axis=1, keepdims=True)


def gradient(
    parameters: Parameters, data: tuple[np.ndarray, np.ndarray], seed: int
) -> tuple[Parameters, float]:
    """The gradient of the cross-entropy of some samples."""
    rows = np.random.default_rng(seed).integers(0, len(data[0]), BATCH)
    pixels, labels = data[0][rows], data[1][rows]
    hidden, odds = forward(parameters, pixels)
    loss = -np.log(odds[np.arange(BATCH), labels] + 1e-12).mean()
    by_logits = (odds - np.eye(10)[labels]) / BATCH
    by_hidden = by_logits @ parameters["out"].T * (hidden > 0)
    return {
        "hidden": pixels.T @ by_hidden,
        "bias": by_hidden.sum(axis=0),
        "out": hidden.T @ by_logits,
    }, float(loss)


def slow_gradient(
    slow: float, parameters: Parameters, data: tuple[Any, ...], seed: int
) -> tuple[Parameters, float]:
    """The same; that of the part which says so takes longer."""
    pixels, labels, late = data
    time.sleep(slow if late else 0)
    return gradient(parameters, (pixels, labels), seed)


def part_of(part: int, parts: int) -> tuple[np.ndarray, np.ndarray, bool]:
    """A worker's data; the last one's is slow to work on."""
    return *digits(part, parts), part == parts - 1


def accuracy(parameters: Parameters) -> float:
    """How many of the unseen digits it reads."""
    pixels, labels = unseen()
    return float((forward(parameters, pixels)[1].argmax(axis=1) == labels).mean())


def rules(workers: int) -> dict[str, tuple[sgd.Rule, int | None, int]]:
    """By name: a rule, how many contribute to a step, and the number of steps."""
    half = workers // 2
    steps = GRADIENTS // half
    return {
        "synchronous": (sgd.Sum(RATE / workers), workers, GRADIENTS // workers),
        "Sum": (sgd.Sum(RATE / workers), half, steps),
        "Hybrid": (sgd.Hybrid(RATE / workers), half, steps),
        "StalenessAdaptive": (sgd.StalenessAdaptive(RATE / workers), half, steps),
        "DelayCompensated": (sgd.DelayCompensated(RATE / workers), half, steps),
        "LocalSteps": (sgd.LocalSteps(RATE), None, GRADIENTS // workers // 4),
        "Gossip": (sgd.Gossip(RATE), None, GRADIENTS // 2),
    }


def learn(client: Client, name: str, seed: int, slow: float = 0.0) -> tuple[float, float]:
    """Train by one rule: the accuracy, and the seconds that it took."""
    workers = len(workers_of(client))
    rule, num_objects, steps = rules(workers)[name]
    data = client.map(part_of, range(workers), parts=workers, pure=False)
    wait(data)
    start = time.perf_counter()
    with sgd.train(
        functools.partial(slow_gradient, slow),
        network(seed),
        data,
        rule,
        num_objects,
        steps,
        seed=seed * 10**6,
        client=client,
    ) as training:
        for _ in training:
            pass
        seconds = time.perf_counter() - start
        return accuracy(training.parameters), seconds


def run(workers: int, seeds: int, slow: float) -> Iterator[dict[str, Any]]:
    """Train by each rule, from several seeds."""
    with (
        LocalCluster(
            n_workers=workers, threads_per_worker=1, dashboard_address=None, silence_logs=40
        ) as cluster,
        Client(cluster) as client,
    ):
        client.register_plugin(Hoplite())
        for seed in range(seeds):
            for name in rules(workers):
                found, seconds = learn(client, name, seed, slow)
                yield {"rule": name, "seed": seed, "accuracy": found, "seconds": seconds}
