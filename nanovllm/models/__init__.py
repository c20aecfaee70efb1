"""Models: a file for each family, what the families share, and the checkpoint loader."""
