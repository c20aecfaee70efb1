"""Speculation: tokens that may come next, verified several in a step. No tensors here."""
