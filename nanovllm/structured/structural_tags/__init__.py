"""Structural tags: free text, tags, schemas and patterns put together, as a grammar in Lark."""
