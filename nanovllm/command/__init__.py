"""The command `nanovllm`: a module for each subcommand, and `main`, the entry point.

PyTorch is imported only when a model is needed, so that `nanovllm --help` is fast.
"""
