"""Benchmarks: scripts that run by themselves, and what bench.py is made of."""
