"""What Hoplite brings, measured against plain Dask: see README.md in this folder."""
