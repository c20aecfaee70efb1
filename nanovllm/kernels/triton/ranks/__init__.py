"""Exchanges of few rows between GPUs."""
