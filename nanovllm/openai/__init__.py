"""The request and response bodies of OpenAI's API, for chats and completions.

request.py      what a body asks for
response.py     the body that answers it
tools.py        a tool that a model may call
tool_formats/   how models write calls: parsers and grammars
token_bytes.py  the bytes of a token, for logprobs

It knows no files, batches or servers: these put their own envelopes around the bodies.
"""
