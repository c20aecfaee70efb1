"""Linear layers, and the norms and activations around them."""
