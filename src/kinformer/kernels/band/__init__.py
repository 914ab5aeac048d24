"""Softmax attention over a band of distances (causal, local, full): tiles of queries with one interval of keys each."""

from kinformer.kernels.band import chunked, flops

__all__ = ["chunked", "flops"]
