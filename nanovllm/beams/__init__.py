"""Beam search: the most likely outputs of a prompt, by steps of several sequences.

search.py   the search of one prompt, over log-probabilities; it runs nothing
calls.py    `beam_search`, which `LLM` inherits
outputs.py  what it returns
"""
