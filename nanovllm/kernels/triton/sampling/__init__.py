"""Draws of tokens from logits."""
