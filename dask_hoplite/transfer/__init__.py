"""The bytes of an object: how they are laid out, kept, and moved over Dask's connections."""
