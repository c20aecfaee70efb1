"""An engine in a process of its own, and the caller's end of it.

messages.py  what the two say to each other
frames.py    how messages go through a socket
loop.py      the engine's process: takes commands, steps, reports tokens
process.py   starts that process, and knows how it ended
mirror.py    the caller's copy of a request: its tokens as they are reported, text, stops

The engine's process makes no text and reads no prompt, so that no caller delays its steps.
"""
