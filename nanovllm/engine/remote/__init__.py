"""An engine in a process of its own, and the caller's end of it.

messages.py      what the two say to each other
frames.py        how messages go through a socket
loop.py          the engine's process: takes commands, steps, reports tokens
process.py       starts that process, and knows how it ended
connection.py    the process as the caller's event loop sees it
mirror.py        the caller's copy of a request: its tokens as they are reported, text, stops
call.py          a request that a caller waits for, by its mirror
calls.py         all of these; passes events on, and counts the samples that run or wait
readers.py       threads that read prompts beside the event loop
controls.py      what callers ask beside requests: statistics, weights, sleep
async_engine.py  all of this together, which AsyncLLM is built on

The engine's process makes no text and reads no prompt, so that no caller delays its steps.
"""
