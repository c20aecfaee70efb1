"""Kernels for the CPU: C++ compiled on this machine, and oneDNN's packed linear layers."""
