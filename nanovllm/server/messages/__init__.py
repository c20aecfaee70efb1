"""Anthropic's Messages API, as a translation into chats.

endpoints.py  /v1/messages, and /v1/messages/count_tokens
request.py    the body of a request as that of a chat
turns.py      turns and their blocks as messages of a chat
thinking.py   whether the model thinks before it answers
events.py     the answer, whole or as events
errors.py     errors as this API writes them
"""
