"""vLLM's names: of options, parameters, classes, methods, attributes and modules.

Each is a key of a table, with our name, or with what to use instead. docs/from_vllm.md shows most
of them. The modules here are tables alone, and import nothing heavy; the server's table of fields
of requests, in which OpenAI's names stand too, is `nanovllm.openai.vllm_fields`.
"""
