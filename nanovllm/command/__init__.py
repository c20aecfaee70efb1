"""The command `nanovllm`: a module for each subcommand, and `main`, which selects one.

PyTorch is imported only when a model is needed, so that `nanovllm --help` is fast.
"""
