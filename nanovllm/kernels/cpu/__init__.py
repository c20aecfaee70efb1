"""Kernels for the CPU: C++ that is compiled on this machine, and oneDNN's linear layers."""
