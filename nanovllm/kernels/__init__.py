"""Triton kernels, each beside the plain PyTorch twin that defines it."""
