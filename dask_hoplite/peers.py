"""Which version of this package each worker has."""

from __future__ import annotations

import logging

import dask_hoplite
from dask_hoplite import versions

logger = logging.getLogger(__name__)


class Peers:
    """What workers have said of themselves."""

    def __init__(self) -> None:
        self.versions: dict[str, str] = {}

    def tell(self, worker: str, version: str) -> None:
        """A worker has this version."""
        self.versions[worker] = version
        if version != dask_hoplite.__version__:
            logger.warning(versions.differing({**self.named(), worker: version}))

    def left(self, worker: str) -> None:
        """A worker is gone."""
        self.versions.pop(worker, None)

    def named(self) -> dict[str, str]:
        """Versions by whose they are."""
        return {"the scheduler": dask_hoplite.__version__, **self.versions}
