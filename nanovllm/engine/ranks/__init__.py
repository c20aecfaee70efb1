"""Communication between ranks: the channel to the workers, and the exchange of tensors."""
