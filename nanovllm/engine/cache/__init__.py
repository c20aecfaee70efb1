"""What layers keep between steps: blocks of tokens, cached prefixes, the pool."""
