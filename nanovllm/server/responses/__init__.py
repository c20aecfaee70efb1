"""OpenAI's Responses API, as a translation into chats.

endpoints.py  /v1/responses, and responses that are stored
request.py    the body of a request: a chat, and what its answer repeats
options.py    its tools, format and reasoning
items.py      items of input as messages of a chat
body.py       the response
events.py     the response, whole or as events
store.py      responses that clients can continue, read and delete
"""
