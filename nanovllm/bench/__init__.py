"""The benchmark: a workload, how long it takes, and how long it would have to.

shapes.py    models without weights
workload.py  random requests
plan.py      what will run, checked before anything does
machine.py   how fast this one is
measure.py   the runs, and what is said of them
trace.py     a profile of some steps
"""
