"""Layers: the modules that models are built from."""
