"""Benchmarks: scripts that run by themselves, and what bench.py compares engines with."""
