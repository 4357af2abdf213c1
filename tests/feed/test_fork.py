"""A feed in a forked child is dead, says so, and lets the child end; the parent goes on."""

import pytest

FORK = """
feed = feed_of({transform})
iterator = iter(feed)
next(iterator)
{before}
if os.fork() == 0:
    try:
        next(iterator)
    except mr.FeedError as error:
        print(error, threads(), flush=True)
        {ending}
code = os.waitstatus_to_exitcode(os.wait()[1])
{after}
print(code, next(iterator).positions.tolist(), flush=True)
iterator = None
print(threads())
"""
SAYS = "this feed was started in another process; a forked child must make its own []\n"


@pytest.mark.parametrize("transform", ["None", "quick", "slow"])
@pytest.mark.parametrize(
    "ending", ["sys.exit(3)", "raise", "del iterator; gc.collect(); sys.exit(3)", "feed.close(); sys.exit(3)"]
)
def test_a_forked_child_is_told_and_the_parent_goes_on(run, transform, ending):
    code, out, err = run(FORK.format(transform=transform, ending=ending, before="", after=""))
    assert code == 0
    assert out == SAYS + f"{1 if ending == 'raise' else 3} [4, 5, 6, 7]\n[]\n"
    assert err.count("Traceback") == (ending == "raise")


@pytest.mark.parametrize(
    "ending", ["sys.exit(3)", "del iterator; gc.collect(); sys.exit(3)", "feed.close(); sys.exit(3)"]
)
def test_a_child_forked_while_a_thread_held_the_lock_ends_too(run, ending):
    before = """
held, go_on = threading.Event(), threading.Event()
def hold():
    with iterator._stage._shared.changed:
        held.set()
        go_on.wait()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
"""
    script = FORK.format(transform="quick", ending=ending, before=before, after="go_on.set(); holder.join()")
    assert run(script) == (0, SAYS + "3 [4, 5, 6, 7]\n[]\n", "")


def test_a_forked_child_can_make_its_own_feed(run):
    code, out, err = run("""
iterator = iter(feed_of(quick))
next(iterator)
while len(iterator._stage._shared.done) < 5:  # until its threads rest: a lock they hold in a fork stays held
    time.sleep(0.01)
if os.fork() == 0:
    with feed_of(quick) as own:
        print([batch.positions[0] for batch, _ in zip(own, range(3))], flush=True)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
""")
    assert (code, out, err) == (0, "[np.int64(0), np.int64(4), np.int64(8)]\n0\n", "")
