"""Chats for APIs that write them in their own forms: the engine's path, and parts of answers.

api.py     requests of such an API: parsed, queued, and answered whole or as events
form.py    what an API must write
blocks.py  an answer as reasoning, texts and calls, one after another
fields.py  fields of bodies, and errors with the names of an API's own fields

It knows no API: those are in responses/ and messages/.
"""
