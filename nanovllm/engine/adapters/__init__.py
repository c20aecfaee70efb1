"""Adapters of requests: which are in the host's memory, on the device, or waited for.

adapter.py   an adapter that requests use, and what says that its files have changed
store.py     the adapters in the host's memory, read by threads beside the steps
residents.py which adapter is in each slot, and which gets one next
parts.py     one rank's part: the slots' tensors
command.py   the command that places an adapter: fills a slot on every rank
calls.py     what the engine asks of all this
requests.py  the engine's own calls that take a `LoRARequest`
"""
