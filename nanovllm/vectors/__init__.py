"""Vectors: prompts that are computed for their hidden states, and generate nothing.

calls.py        `embed`, `encode` and `score`, which `LLM` inherits
plans.py        `embed` and `encode`: from prompts to requests, and from these to outputs
scores.py       the same of `score`
preparer.py     checks and encodes prompts
conventions.py  how a model's vectors are made, by sentence-transformers' files
rerank.py       the prompts of Qwen3-Embedding and Qwen3-Reranker
outputs.py      what the calls return

What a request keeps of its states is in vectors/pooling.py.
"""
