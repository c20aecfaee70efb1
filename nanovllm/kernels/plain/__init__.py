"""Plain PyTorch: the definition of every operation, and what runs where nothing is faster."""
