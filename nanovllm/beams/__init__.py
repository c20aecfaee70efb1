"""Beam search: the most likely outputs of a prompt, by steps of several sequences.

beams.py    `beam_search`, a part of an `LLM`
async_beams.py  the same among the requests of an `AsyncLLM`, for the server
search.py   the search for one prompt, over log-probabilities; it runs nothing
outputs.py  what it returns
"""
