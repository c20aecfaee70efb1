"""The command `nanovllm`: a module for each subcommand, and `main`, which chooses.

Nothing here imports PyTorch before a model is asked for: `nanovllm --help` takes no time.
"""
