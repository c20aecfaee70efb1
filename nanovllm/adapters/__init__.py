"""Adapters: low-rank additions to a model's layers, read from files and placed on devices."""
