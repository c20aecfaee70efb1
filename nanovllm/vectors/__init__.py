"""Vectors: prompts that are computed for their hidden states, and generate nothing.

vectors.py           `embed`, `encode` and `score`, a part of an `LLM`
async_vectors.py     the same for an `AsyncLLM`
plans.py             `embed` and `encode`: from prompts to requests, and from these to outputs
scores.py            the same for `score`
preparer.py          checks and encodes prompts
conventions.py       how a model's vectors are made, by sentence-transformers' files
rerank.py            the prompts of Qwen3-Embedding and Qwen3-Reranker
pooling.py           what a request keeps of a prompt's states, and the ways to pool them
generated_states.py  what a request keeps of the states of generated tokens
hidden_states.py     takes states from steps to the sequences that keep them
outputs.py           what the calls return
"""
