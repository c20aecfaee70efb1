"""Drafts: guessed tokens that a step verifies, made on the host or on the device."""
