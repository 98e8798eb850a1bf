"""``dask hoplite bench``: plain Dask and Hoplite in turns on one cluster.

The laboratory (``benchmarks/`` in the repository) shares operations, turns and table with it.
"""
