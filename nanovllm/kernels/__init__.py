"""What runs below the layers: plain PyTorch definitions, and faster twins of them."""
