"""Layers of experts, and their routers."""
