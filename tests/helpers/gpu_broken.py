"Checks for the table of `benchmarks/gpu.py` that fail on purpose"
import os
from gpu_checks import NotHere,check,checks

checks.clear()

@check('one')
def wrong(at):
    "Raises an error"
    assert at.size==2, 'on purpose'

@check('ranks', secs=60)
def dies(at):
    "One rank ends without a word"
    if at.rank: os._exit(1)
    return 'well'

@check('one')
def elsewhere(at):
    "Is for another machine"
    raise NotHere('it needs two nodes')

@check('one')
def right(at):
    "Holds"
    return 'well'
