"""An engine in a process of its own, and the caller's side of it.

messages.py       the messages between the two processes
loop.py           in the engine's process: takes commands, steps, reports tokens
process.py        starts the engine's process, and finds out how it ended
connection.py     commands to the process and events from it, in the caller's event loop
request_copy.py   the caller's copy of a request: its tokens as they are reported, text, stops
open_request.py   a request that a caller waits for, by its copy
request_table.py  all open requests; passes events on, and counts the samples that run or wait
readers.py        threads that read prompts while the event loop goes on
async_engine.py   the base of AsyncLLM, made of all these

The engine's process does not decode text or tokenize prompts, so that no caller delays its steps.
Its entry is nanovllm/engine_main.py, which makes the engine and the table of its answers.
"""
