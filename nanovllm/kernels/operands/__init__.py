"""Operands of kernels that are not plain tensors, the same for all implementations."""
