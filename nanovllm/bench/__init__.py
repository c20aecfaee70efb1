"""The benchmark: time a workload, and compare the time with the least possible one.

shapes.py      model configs for random weights
workload.py    random requests
plan.py        everything that a run needs, checked before it starts
machine.py     measure how fast this machine is
roofline.py    the least time of a workload on a machine
acceptance.py  drafts that are right by chance
measure.py     time the runs and print the figures
trace.py       a profile of some steps
"""
