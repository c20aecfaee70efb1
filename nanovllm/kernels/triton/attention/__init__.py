"""Attention, and the cache of keys and values."""
