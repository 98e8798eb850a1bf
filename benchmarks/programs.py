"""Programs that know nothing of Hoplite, by other people's libraries, on data that these ship.

Each is what a user of that library would write. Tests and benchmark use the same ones.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from distributed import Client, wait

from dask_hoplite.bench.workloads import Workload

#: Partitions of what stays where it is.
PARTS = 8

#: Each is so many times as large as what is brought to it, or else Dask would rather move it.
LARGER = 1.25

#: Rows in each part of what a model is asked.
ROWS = 16

#: Bytes of a row of scikit-learn's digits, and of a model per pixel or tree.
DIGIT, PER_PIXEL, PER_TREE = 64 * 8, 300, 300_000


@dataclass(frozen=True)
class Program:
    """A program in two steps, of which the second one is timed.

    Parameters
    ----------
    load : callable
        Takes the client and the bytes of the large object, if there is one, and returns what is
        there before the program begins: in the client, or persisted on the workers.
    run : callable
        Takes the client and that, and returns the result, as arrays.
    hot : bool
        Whether there is a large object that goes to several workers.
    """

    load: Callable[[Client, int], Any]
    run: Callable[[Client, Any], np.ndarray]
    hot: bool = True


# What is there before a program begins


@functools.cache
def tiled(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """So many of scikit-learn's digits, again and again, and which digit each one is."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    again = -(-rows // len(x))
    return np.tile(x, (again, 1))[:rows], np.tile(y, again)[:rows]


def digits(client: Client, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Many digits, in the client."""
    return tiled(nbytes // DIGIT)


def digits_there(client: Client, nbytes: int) -> tuple[Any, Any]:
    """Many digits, on the workers, as arrays of Dask."""
    x, y = (persisted(client, array) for array in blocks(*tiled(nbytes // DIGIT)))
    return x, y


def few_digits(client: Client, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Fewer of them; nothing is large."""
    return tiled(2048)


@functools.cache
def pixels() -> tuple[np.ndarray, np.ndarray]:
    """Places in a photograph that scikit-learn ships, in any order, and how red each one is."""
    from sklearn.datasets import load_sample_image

    image = load_sample_image("china.jpg")
    places = np.argwhere(np.ones(image.shape[:2], bool)).astype("f4")
    order = np.random.default_rng(0).permutation(len(places))
    return places[order], image[..., 0].ravel()[order].astype("f4")


@functools.cache
def grown(nbytes: int) -> Any:
    """A random forest that has learnt the photograph, of about so many bytes."""
    from sklearn.ensemble import RandomForestRegressor

    places, red = pixels()
    rows = min(nbytes // PER_PIXEL, len(red))
    return RandomForestRegressor(4, random_state=0).fit(places[:rows], red[:rows])


@functools.cache
def boosted(nbytes: int) -> Any:
    """XGBoost's kind of forest that has learnt the same."""
    import xgboost

    trees = max(nbytes // PER_TREE, 1)
    parameters = {"num_parallel_tree": trees, "subsample": 0.8, "max_depth": 14, "max_bin": 512}
    return xgboost.train({**parameters, "nthread": 1}, xgboost.DMatrix(*pixels()), 1)


def asked(client: Client) -> Any:
    """Places of the photograph at which models are asked, on the workers."""
    import dask.array as da

    places, _ = pixels()
    return persisted(client, da.from_array(places[: PARTS * ROWS], chunks=(ROWS, 2)))


def forest(client: Client, nbytes: int) -> tuple[Any, Any]:
    """A random forest in the client, and what it is asked."""
    return grown(nbytes), asked(client)


def booster(client: Client, nbytes: int) -> tuple[Any, Any]:
    """XGBoost's model in the client, and what it is asked."""
    return boosted(nbytes), asked(client)


def photograph(index: int, side: int) -> np.ndarray:
    """One of two photographs, as often as it takes to fill a square, in grey."""
    from sklearn.datasets import load_sample_image

    image = load_sample_image(("china.jpg", "flower.jpg")[index % 2])
    grey = np.roll(image.mean(axis=2, dtype="f4"), index, axis=0)
    again = [-(-side // length) for length in grey.shape]
    return np.ascontiguousarray(np.tile(grey, again)[:side, :side])


def exposures(part: int, side: int) -> np.ndarray:
    """Two photographs."""
    return np.stack([photograph(2 * part + index, side) for index in (0, 1)])


def film(client: Client, nbytes: int) -> tuple[Any, np.ndarray]:
    """Many photographs on the workers, and one in the client that is to be taken from each."""
    import dask
    import dask.array as da

    side = int((nbytes / 4) ** 0.5)
    made = dask.delayed(exposures)
    parts = [da.from_delayed(made(part, side), (2, side, side), "f4") for part in range(PARTS)]
    return persisted(client, da.concatenate(parts)), photograph(0, side)


def film_and_average(client: Client, nbytes: int) -> tuple[Any, Any]:
    """Many photographs, and one more, all on the workers."""
    import dask
    import dask.array as da

    photographs, one = film(client, nbytes)
    there = da.from_delayed(dask.delayed(photograph)(0, len(one)), one.shape, one.dtype)
    return photographs, persisted(client, there)


def images(part: int, rows: int, of: int, names: str) -> Any:
    """A partition of a frame of digits, each with the number of an image."""
    import pandas as pd

    x, y = tiled(rows)
    numbers = np.random.default_rng(part).permutation(rows) % of
    columns = {f"{names}{index}": column for index, column in enumerate(x[numbers].T)}
    return pd.DataFrame({"image": numbers, f"{names}_digit": y[numbers], **columns})


def frames(client: Client, nbytes: int) -> tuple[Any, Any]:
    """A frame of many partitions, and one of a single one, both on the workers."""
    import dask.dataframe as dd

    of = nbytes // (DIGIT + 16)
    rows = int(of * LARGER)
    many = dd.from_map(images, range(PARTS), rows=rows, of=of, names="seen", meta=meta("seen"))
    single = dd.from_map(images, [PARTS], rows=of, of=of, names="drawn", meta=meta("drawn"))
    return persisted(client, many), persisted(client, single)


def meta(names: str) -> Any:
    """What a frame of images looks like."""
    return images(0, 1, 1, names)


def persisted(client: Client, collection: Any) -> Any:
    """A collection of Dask, on the workers."""
    collection = client.persist(collection)
    wait(collection)
    return collection


# Programs


def grid_search(client: Client, data: tuple[np.ndarray, np.ndarray], **options: Any) -> np.ndarray:
    """scikit-learn tries eight parameters, by way of joblib."""
    import joblib
    from sklearn.model_selection import GridSearchCV
    from sklearn.naive_bayes import GaussianNB

    search = GridSearchCV(GaussianNB(), {"var_smoothing": np.logspace(-9, 0, 8)}, cv=2)
    with joblib.parallel_config("dask", client=client, **options):
        search.fit(*data)
    return search.cv_results_["mean_test_score"]


def grid_search_scattered(client: Client, data: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The same, but the user tells joblib to bring the data to all workers at first."""
    return grid_search(client, data, scatter=list(data))


def random_forest(client: Client, data: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """scikit-learn grows a tree in each task, by way of joblib."""
    import joblib
    from sklearn.ensemble import RandomForestClassifier

    forest = RandomForestClassifier(2 * PARTS, max_depth=4, random_state=0)
    with joblib.parallel_config("dask", client=client):
        forest.fit(*data)
    return forest.predict_proba(data[0][:1000])


def boosted_prediction(client: Client, data: tuple[Any, Any]) -> np.ndarray:
    """XGBoost asks a model that the client has trained."""
    from xgboost import dask as dxgb

    return dxgb.predict(client, *data).compute()


def boosted_training(client: Client, data: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """XGBoost trains on all workers."""
    from xgboost import dask as dxgb

    matrix = dxgb.DaskDMatrix(client, *blocks(*data))
    trained = dxgb.train(client, {"max_depth": 3}, matrix, 3)
    return dxgb.predict(client, trained, matrix).compute()


def blocks(x: np.ndarray, y: np.ndarray) -> tuple[Any, Any]:
    """Arrays as arrays of Dask."""
    import dask.array as da

    rows = len(x) // PARTS
    return da.from_array(x, chunks=(rows, -1)), da.from_array(y, chunks=rows)


def parallel_post_fit(client: Client, data: tuple[Any, Any]) -> np.ndarray:
    """Dask-ML asks a model that scikit-learn has trained."""
    from dask_ml.wrappers import ParallelPostFit

    model, places = data
    return ParallelPostFit(model).predict(places).compute()


def incremental(client: Client, data: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Dask-ML trains a model with one block after the other."""
    from dask_ml.wrappers import Incremental
    from sklearn.linear_model import SGDClassifier

    model = Incremental(SGDClassifier(random_state=0), shuffle_blocks=False)
    model.fit(*blocks(*data), classes=range(10))
    return model.estimator_.coef_


def dask_grid_search(client: Client, data: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Dask-ML tries eight parameters."""
    from dask_ml.model_selection import GridSearchCV
    from sklearn.naive_bayes import GaussianNB

    search = GridSearchCV(GaussianNB(), {"var_smoothing": np.logspace(-9, 0, 8)}, cv=2)
    search.fit(*data)
    return search.cv_results_["mean_test_score"]


def difference(client: Client, data: tuple[Any, Any]) -> np.ndarray:
    """dask.array takes one photograph from all others."""
    photographs, one = data
    return abs(photographs - one).max(axis=(1, 2)).compute()


def anomaly(client: Client, data: tuple[Any, np.ndarray]) -> np.ndarray:
    """xarray does so; the one is a constant of the program."""
    import xarray as xr

    photographs, one = data
    cube = xr.DataArray(photographs, dims=("time", "y", "x"))
    return abs(cube - xr.DataArray(one, dims=("y", "x"))).max(("y", "x")).compute().values


def broadcast_join(client: Client, data: tuple[Any, Any]) -> np.ndarray:
    """dask.dataframe merges a frame with one of a single partition."""
    return joined(*data).compute().sort_index().to_numpy()


def joined(many: Any, single: Any) -> Any:
    """What was seen, and what was drawn, for each digit."""
    return many.merge(single, on="image").groupby("drawn_digit").sum()


def shuffle(client: Client, data: tuple[Any, Any]) -> np.ndarray:
    """A shuffle of Dask's peer-to-peer kind, and nothing else."""
    return shuffled(*data).compute().sort_index().to_numpy()


def shuffled(many: Any, single: Any) -> Any:
    """What was seen of each image, all of an image in one partition."""
    parts = many.shuffle("image", shuffle_method="p2p")
    return parts.map_partitions(totals, meta=totals(meta("seen")))


def totals(part: Any) -> Any:
    """How much was seen of each image."""
    return part.drop(columns="image").sum(axis=1).groupby(part["image"]).sum()


def join_beside_shuffle(client: Client, data: tuple[Any, Any]) -> np.ndarray:
    """Both at the same time."""
    import dask

    both = dask.compute(joined(*data), shuffled(*data))
    return np.concatenate([frame.sort_index().to_numpy().ravel() for frame in both])


#: All programs by name.
PROGRAMS = {
    "grid-search": Program(digits, grid_search),
    "grid-search-scattered": Program(digits, grid_search_scattered),
    "random-forest": Program(digits, random_forest),
    "xgboost-predict": Program(booster, boosted_prediction),
    "xgboost-train": Program(few_digits, boosted_training, hot=False),
    "post-fit": Program(forest, parallel_post_fit),
    "incremental": Program(few_digits, incremental, hot=False),
    "dask-grid-search": Program(digits, dask_grid_search),
    "dask-grid-search-blocks": Program(digits_there, dask_grid_search),
    "array": Program(film_and_average, difference),
    "xarray": Program(film, anomaly),
    "join": Program(frames, broadcast_join),
    "join-beside-shuffle": Program(frames, join_beside_shuffle),
    "shuffle": Program(frames, shuffle, hot=False),
}


class Running(Workload):
    """A program as something to be measured."""

    program: ClassVar[Program]

    def prepare(self) -> None:
        self.data = self.program.load(self.client, self.nbytes)

    def run(self) -> None:
        self.result = self.program.run(self.client, self.data)

    def correct(self) -> bool:
        return bool(np.isfinite(self.result).all())

    def figures(self) -> dict[str, object]:
        return {"digest": hashlib.sha256(np.ascontiguousarray(self.result).tobytes()).hexdigest()}


#: The same, as operations.
RUNNING: dict[str, type[Workload]] = {
    name: type(name, (Running,), {"program": program}) for name, program in PROGRAMS.items()
}


def compared(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Records, whose values are right only if both systems have the same, bit by bit."""
    first: dict[tuple[Any, ...], str] = {}
    for record in records:
        if (digest := record.get("digest")) is not None:
            expected = first.setdefault((record["op"], record["nbytes"]), digest)
            record["correct"] = record["correct"] and digest == expected
        yield record
