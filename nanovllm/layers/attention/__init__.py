"""The attention layer, its backends, and the choice among them."""
