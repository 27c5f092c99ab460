"What the default run takes of tests whose rows are tried on several numbers of ranks: each row once, and each number in turn; `--whole` takes all"
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

def covering(group, by):
    "Return those of `group`, all items of one test, that have each combination of the other axes with one value of `by`; a table of `cases` is an axis too"
    at,tables = _indices(group),[o.callspec.params.get('cases') for o in group]
    n = {k:1+max(o[k] for o in at) for k in at[0]} | ({'cases':len(tables[0])} if tables[0] else {})
    longest = max((v for k,v in n.items() if k!=by), default=1)
    if n.get(by, 1)==1 or longest==1: return group
    every = min(n[by], longest) # where `by` is the longest, a row has more than one of its values
    for o,i,table in zip(group, at, tables):
        if table: o.callspec.params['cases'] = {k:f for j,(k,f) in enumerate(table.items()) if (sum(i.values())+j-2*i[by])%every==0}
    return [o for o,i,table in zip(group, at, tables) if (o.callspec.params['cases'] if table else (sum(i.values())-2*i[by])%every==0)]

def covered(items, by='size'):
    "Return `items` without those of other numbers of ranks than a covering selection has, in their order"
    tests = defaultdict(list)
    for o in items: tests[o.nodeid.partition('[')[0]].append(o)
    left = {o for g in tests.values() if by in getattr(getattr(g[0], 'callspec', None), 'params', ()) for o in set(g)-set(covering(g, by))}
    return [o for o in items if o not in left]
