"""Triton kernels for GPUs. Each file's twin in `kernels/plain/` defines what it computes."""
