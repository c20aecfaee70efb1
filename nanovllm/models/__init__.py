"""Models: their configuration, the decoder that they share, and the checkpoint loader."""
