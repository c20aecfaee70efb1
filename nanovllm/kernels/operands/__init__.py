"""What kernels read apart from plain tensors, for every implementation."""
