"""Kernels in plain PyTorch, C++ and Triton, with the same file names. `table` binds them."""
