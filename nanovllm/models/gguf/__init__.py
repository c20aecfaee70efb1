"""GGUF files: a file becomes a directory with what a checkpoint's directory has.

`directory.py` makes it, `file.py` reads the format, `fields.py` makes config.json of the metadata,
`tokenizer.py` the tokenizer's files, and `tensors.py` reads the weights.
"""
