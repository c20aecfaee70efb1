"""What adapters add to linear layers."""
