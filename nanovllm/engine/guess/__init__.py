"""Guesses: drafts that a device makes by itself, in the step that verifies them."""
