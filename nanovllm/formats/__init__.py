"""Formats: how matrices are stored in checkpoints, divided among ranks, and multiplied."""
