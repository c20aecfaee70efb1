"""The architectures, and the registry that finds them by name."""
