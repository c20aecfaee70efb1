"""vLLM's classes and calls, for scripts written for them. Loaded when one is first asked for."""
