"""Requests: from a prompt to sequences, and from their tokens to texts, events and outputs."""
