"""A step: its inputs, the device table, the shard that computes it, and its results."""
