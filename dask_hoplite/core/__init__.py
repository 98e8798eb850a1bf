"""The deciding core. It imports neither Dask nor anything that does input or output."""
