"""Live weights: updates, and memory that sleeping frees."""
