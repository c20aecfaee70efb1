"""Layers with states: short convolutions, recurrences, and the norms after them."""
