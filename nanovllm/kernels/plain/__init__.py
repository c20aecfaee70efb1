"""Kernels in plain PyTorch: they define every operation, and run on every device."""
