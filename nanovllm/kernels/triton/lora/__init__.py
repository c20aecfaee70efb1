"""Add adapters to linear layers."""
