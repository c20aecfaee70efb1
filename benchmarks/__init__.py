"""Benchmarks: scripts to run directly, and the engines that bench.py compares with."""
