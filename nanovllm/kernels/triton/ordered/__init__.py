"""Kernels with one order of sums: a row of outputs depends on that row's inputs alone."""
