"""How ranks reach each other: the channel to the workers, and the exchange of tensors."""
