"""Structured output: grammars, the constraints that follow tokens, and masks of the logits."""
