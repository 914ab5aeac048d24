"""A trained run for many at a time: sequences stepped as one batch (``engine``), behind HTTP (``server``)."""
