"""vLLM's names: of options, parameters, fields, classes, methods, attributes and modules.

Each is a key of a table, with our name, or with what to use instead. docs/from_vllm.md shows most
of them. The modules here are tables alone, and import nothing heavy. In the table of fields of
requests, OpenAI's names stand too.
"""
