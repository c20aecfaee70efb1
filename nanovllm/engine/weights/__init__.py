"""Weights that change while an engine lives: updates, reading them, sleep. One way in: `calls`."""
