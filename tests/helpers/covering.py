"What the default run takes of tests with parameters: each value of each of them, and each row on one of the numbers of ranks, in turn, or a test without rows on three; `--whole` takes all"
import re
from collections import defaultdict

def _axes(item):
    "Return the values of each `parametrize` of `item`, by its names: the same objects in all items of a test"
    names = [re.findall(r'\w+', o) if isinstance(o, str) else o for o in (m.args[0] for m in item.iter_markers('parametrize'))]
    return {','.join(ks):tuple(id(item.callspec.params[k]) for k in ks) for ks in names}

def _indices(group):
    "Return for each of `group`, all items of one test, the place of its value on each axis"
    axes,at = list(map(_axes, group)),defaultdict(dict)
    return [{k:at[k].setdefault(v, len(at[k])) for k,v in o.items()} for o in axes]

def diagonal(group, by):
    "Return those of `group`, all items of one test, whose values on axes other than `by` lie on the diagonal: as many as the longest axis has values"
    at = [{k:i for k,i in o.items() if k!=by} for o in _indices(group)]
    n = {k:1+max(o[k] for o in at) for k in at[0]}
    if len(n)<2: return group
    longest = max(n, key=n.get)
    return [o for o,i in zip(group, at) if all(i[k]==i[longest]%n[k] for k in n)]

def covering(group, by):
    "Return those of `group`, all items of one test, that have each combination of the other axes with one value of `by`; a table of `cases` is an axis too"
    at,tables,rows = _indices(group),[o.callspec.params.get('cases') for o in group],{}
    at = [(o.get(by, 0),rows.setdefault(tuple(v for k,v in o.items() if k!=by), len(rows))) for o in at]
    n,longest = 1+max(i for i,_ in at),max(len(rows), len(tables[0] or ()))
    if n==1: return group
    if longest==1: return [o for o in group if o.callspec.params[by]==3] or group
    every = min(n, longest) # where `by` is the longest, a row has more than one of its values
    def turn(i, row, j=0): return (row+row//every+j-i)%every==0
    for o,(i,row),table in zip(group, at, tables):
        if table: o.callspec.params['cases'] = {k:f for j,(k,f) in enumerate(table.items()) if turn(i, row, j)}
    return [o for o,(i,row),table in zip(group, at, tables) if (o.callspec.params['cases'] if table else turn(i, row))]

def covered(items, by='size'):
    "Return `items` without those that a covering selection does not need, in their order"
    tests,found = defaultdict(list),set()
    for o in items: tests[o.nodeid.partition('[')[0]].append(o)
    for group in tests.values():
        params = getattr(getattr(group[0], 'callspec', None), 'params', ())
        if params: group = diagonal(group, by)
        found |= {*(covering(group, by) if by in params else group)}
    return [o for o in items if o in found]
