"""The parts that all kernels of softmax attention share: the request, the result,
their merging, and dropout by a seed."""
