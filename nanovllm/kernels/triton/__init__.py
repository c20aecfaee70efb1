"""Triton kernels for GPUs. The file of the same name in `kernels/plain/` defines the results."""
