"All ranks save or stop at one step: asked for by any rank at any moment, by several at once, at any speed, with nothing exchanged in a quiet step"
import io,os,pytest,random,signal,threading,time
from collections import Counter
from contextlib import contextmanager,redirect_stderr
from unittest import mock
from fastcore.test import test_eq
from fastai.basics import *
from torch import distributed as dist
from fastdist import *
from fastdist.job.world import World
from fastdist.comm.wire import Line
from fastdist.comm.steps import StepAgreement
from fastdist.comm.vote import Notes,voting_connection
from fastdist.comm.watchdog import Watchdog

ours = {'wish','fence','fenced','decided','reached'}

@contextmanager
def agreeing(*parts):
    "Open a control connection with `parts`; return it and its agreement on steps"
    with voting_connection(this_world()).add(StepAgreement, *parts).open() as line: yield line,line.part(StepAgreement)

@contextmanager
def counted():
    "Count the messages that this rank sends, by kind"
    n,send = Counter(),Line.send
    with mock.patch.object(Line, 'send', lambda self, **msg: n.update([msg['kind']]) or send(self, **msg)): yield n

def gradients(): dist.all_reduce(torch.ones(100))

def run_steps(steps, rank, n, chance, rng):
    "Train for `n` steps of random length, and ask now and then; return what was agreed on and what this rank asked for"
    res,asked = {},Counter()
    for _ in range(n):
        gradients()
        if rng.random()<.02: time.sleep(rng.random()*.003)
        if rng.random()<chance:
            asked[what := rng.choice(steps.wishes)] += 1
            steps.request(what)
        what = steps.boundary()
        if what: res[steps.step] = what
    return res,asked

def many(rank, n=800):
    rng = random.Random(rank)
    with agreeing(Notes,Watchdog) as (line,steps), counted() as sent:
        steps.begin_steps(0)
        res,asked = run_steps(steps, rank, n, .005, rng)
        line.votes.meet()
        return res,asked,sent

@pytest.mark.parametrize('size', (2,3,4))
def test_many_rounds_at_random_speeds(size):
    out = on_ranks(many, size)
    test_eq([o for o,_,_ in out], [out[0][0]]*size)
    found,n = Counter(out[0][0].values()),len(out[0][0])
    assert found['save']>2 and found['stop']>2
    for _,asked,sent in out[1:]:
        test_eq(sent['wish'], asked.total())
        assert sent['reached']==n<=sent['fenced']<=n+1

def quiet(rank):
    with agreeing(Notes,Watchdog) as (line,steps), counted() as sent:
        steps.begin_steps(0)
        begun = line.votes.exchanges.n
        for _ in range(300):
            gradients()
            assert steps.boundary() is None
        return sum(sent[o] for o in ours),line.votes.exchanges.n-begun

def test_a_quiet_step_exchanges_nothing(): test_eq(on_ranks(quiet, 3), [(0,0)]*3)

def free_running(rank, n=200_000):
    "Steps that wait for nothing: the thread sets its fence while the main thread runs past"
    with agreeing() as (line,steps):
        steps.begin_steps(0)
        line.votes.meet()
        res = []
        for i in range(n):
            if i%20_000==rank: steps.request('save')
            if steps.boundary(): res.append(steps.step)
        line.votes.meet()
        return res

def test_no_rank_runs_past_a_fence():
    "A fence that was set too late would make its rank return a step that is too large, or nothing; the last may not come"
    res = on_ranks(free_running, 3, join=False)
    short = min(map(len, res))
    assert short and max(map(len, res))-short<=1
    test_eq([o[:short] for o in res], [res[0][:short]]*3)

def asks(rank, who, what):
    with agreeing() as (line,steps):
        steps.begin_steps(0)
        res = []
        while not res:
            gradients()
            if steps.step==3 and rank in who: steps.request(what)
            res = [o for o in [steps.boundary()] if o]
        later = [steps.boundary() for _ in range(20)]
        line.votes.meet()
        return steps.step,res,set(later)

@pytest.mark.parametrize('who', ([0],[1],[2],[0,1,2]), ids=str)
def test_one_stop_whoever_asks(who):
    res = on_ranks(partial(asks, who=who, what='stop'), 3)
    test_eq(res, [(res[0][0],['stop'],{None})]*3)

def later(rank):
    "A stop that is asked for between the decision to save and the save"
    with agreeing() as (line,steps):
        steps.begin_steps(0)
        if rank==1: steps.request('save')
        with line.news: line.news.wait_for(lambda: steps.verdict)
        if rank==1: steps.request('stop')
        line.votes.meet()
        res = []
        while 'stop' not in res:
            gradients()
            res += [o for o in [steps.boundary()] if o]
        return res

def test_what_is_asked_for_in_a_round_comes_after_it(): test_eq(on_ranks(later), [['save','stop']]*2)

def ends(rank):
    "Three fits; in the last steps of each all ask, and none of them may wait or take what was meant for another fit"
    res,rng = [],random.Random(rank)
    with agreeing() as (line,steps):
        for fit in range(30):
            steps.begin_steps(fit<<32)
            for i in range(5):
                gradients()
                if i>=3 and rng.random()<.7: steps.request('save')
                res.append((fit,i,steps.boundary()))
        line.votes.meet()
    return res

@pytest.mark.parametrize('size', (2,3))
def test_the_last_steps_of_a_fit(size):
    res = on_ranks(ends, size)
    test_eq(res, [res[0]]*size)

def early(rank):
    "Rank 1 begins the next fit, and asks, while the others are still between the two"
    with agreeing() as (line,steps):
        steps.begin_steps(0)
        line.votes.meet()
        if rank==1:
            steps.begin_steps(100)
            steps.request('save')
        line.votes.meet()
        if rank!=1: steps.begin_steps(100)
        res = []
        while not res: res += [steps.step for _ in range(3) if steps.boundary()]
        return res

def test_who_begins_a_fit_first_may_ask_first(): test_eq(on_ranks(early, 3), [[102]]*3)

def dies(rank, who):
    "What a rank hears when another is killed as it is told of a round; that one is a child of its process, which returns how it ended"
    if rank==who and (pid := os.fork()): return os.waitpid(pid, 0)[1]
    with agreeing(Notes,Watchdog) as (line,steps):
        steps.begin_steps(0)
        if rank==who: steps.on_fence = lambda **msg: os.kill(os.getpid(), signal.SIGKILL)
        line.votes.meet()
        if rank==who: time.sleep(60)
        line.faults.arm()
        steps.request('stop')
        try:
            while True: steps.boundary()
        except RankError as e: return e.rank

@pytest.mark.parametrize('who', (0,1,2))
def test_a_rank_killed_in_a_round(who): test_eq(on_ranks(partial(dies, who=who), 3, join=False), [signal.SIGKILL if r==who else who for r in range(3)])

def waits(rank):
    "The thread of rank 1 does not answer, so the others wait at their fence, until Ctrl-C ends rank 0"
    with agreeing(Notes,Watchdog) as (line,steps), redirect_stderr(io.StringIO()) as err:
        steps.begin_steps(0)
        line.part(Watchdog).notice = 1
        if rank==1: steps.on_fence = noop
        line.votes.meet()
        line.faults.arm()
        try:
            if rank==1:
                with line.news: line.news.wait_for(lambda: False)
            steps.request('save')
            if rank==0: threading.Thread(target=presses, args=(line,err)).start()
            while True: steps.boundary()
        except KeyboardInterrupt as e: line.faults.failed_here(e)
        except RankError as e: return e.rank,e.msg.strip().rpartition('\n')[2]
        return err.getvalue()

def presses(line, err):
    "Press Ctrl-C when rank 0 has said that it waits"
    while 'waited' not in err.getvalue(): time.sleep(.1)
    signal.pthread_kill(line.ident, signal.SIGINT)

def test_a_wait_at_the_fence_is_told_and_ends_with_ctrl_c():
    said,*others = on_ranks(waits, 3, join=False)
    assert 'in the agreement on a step' in said
    test_eq(others, [(0,'KeyboardInterrupt')]*2)

class Late(StepAgreement):
    "Its main thread makes seven steps while the thread sets a fence for the first time"
    def __setattr__(self, k, v):
        super().__setattr__(k, v)
        if k=='fence' and v==2: self.step += 7

def test_a_fence_that_came_too_late_is_set_anew():
    with voting_connection(World()).add(Late) as line:
        steps = line.part(Late)
        steps.begin_steps(0)
        steps.on_fence(rank=0, n=1, gen=0, base=0)
        test_eq((steps.step,steps.fence), (7,9))

def leaves_at_once(rank):
    send = Line.send
    def slow(self, **msg):
        if msg['kind']=='all' and self is [*line.lines.values()][-1]: time.sleep(.5) # the other one has left by then
        send(self, **msg)
    with voting_connection(this_world()).add(Notes,Watchdog).open() as line, mock.patch.object(Line, 'send', slow):
        if rank==0: time.sleep(.2) # the last to come tells the others, from its main thread
        line.votes.meet()

def test_a_rank_may_leave_while_another_has_not_heard_that_all_have_met(): on_ranks(leaves_at_once, 3)
