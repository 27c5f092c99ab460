"All benchmarks: `python benchmarks`, and with `--save` their rows for the notebook"
from pathlib import Path
from fastcore.all import call_parse
import order,start,steps

@call_parse
def main(
    save:bool=False # Put the rows in the place of those that the notebook shows?
):
    "Time steps, validations, orders and starts of fastdist and its peers, in turn, and count collectives"
    here = Path(__file__).parent
    for o in (steps,order,start): o.main(out=here/f'{o.__name__}.json' if save else None)
