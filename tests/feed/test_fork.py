"""A feed in a forked child is dead, says so, and lets the child end; the parent goes on."""

import numpy as np
import pytest

import millrace as mr

pytestmark = pytest.mark.own_process
FORK = """
feed = feed_of({transform})
iterator = iter(feed)
next(iterator)
if os.fork() == 0:
    try:
        next(iterator)
    except mr.FeedError as error:
        print(error, threads(), flush=True)
        {ending}
code = os.waitstatus_to_exitcode(os.wait()[1])
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
    code, out, err = run(FORK.format(transform=transform, ending=ending))
    assert code == 0
    assert out == SAYS + f"{1 if ending == 'raise' else 3} [4, 5, 6, 7]\n[]\n"
    assert err.count("Traceback") == (ending == "raise")


def test_a_forked_child_can_make_its_own_feed(run):
    code, out, err = run("""
iterator = iter(feed_of(quick))
next(iterator)
if os.fork() == 0:
    with feed_of(quick) as own:
        print([batch.positions[0] for batch, _ in zip(own, range(3))], flush=True)
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
""")
    assert (code, out, err) == (0, "[np.int64(0), np.int64(4), np.int64(8)]\n0\n", "")


def test_a_child_forked_while_shards_are_mapped_can_make_its_own_feed(run, tmp_path):
    """Whatever locks the threads of the parent hold in that moment; its report is refused rather than waited for."""
    with mr.StoreWriter(tmp_path / "store", columns={"v": mr.Column("float32", (4,))}, shard_bytes=4000) as writer:
        for k in range(20_000):
            writer.append({"v": np.full((3, 4), k, np.float32)})
    code, out, err = run(f"""
store = mr.open_store({str(tmp_path / "store")!r})
view = mr.Records(store, columns=["v"])
feed = mr.Feed(view, batch=2000, device="numpy", workers=2)
iterator = iter(feed)
with store._shards._lock, store._shards._descriptors._lock:  # as a thread may
    child = os.fork()
if child == 0:
    print(next(iter(mr.Feed(view, batch=16, device="numpy"))).num_samples, flush=True)
    try:
        feed.report()
    except mr.FeedError as error:
        print(error, flush=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
iterator.close()
""")
    assert (code, err) == (0, "")
    assert out == "16\nthis feed was started in another process; a forked child must make its own\n0\n"


@pytest.mark.parametrize(
    ("ending", "expected", "says"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('no')", 1, "no\n"),
        ("raise KeyError('mine')", 1, "KeyError: 'mine'"),
        ("return batch", 0, ""),
        ("os._exit(5)", 5, ""),
    ],
)
def test_a_child_that_a_transform_forks_ends_there_and_the_feed_goes_on(run, ending, expected, says):
    """It must not come back into the stage, which has no other threads in the child and would wait for ever."""
    code, out, err = run(f"""
def fork(batch, rng):
    child = os.fork()
    if child == 0:
        print("child")
        {ending}
    return {{**batch, "code": np.full(4, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))}}

feed = feed_of(fork, workers=1)
print([int(batch.code[0]) for batch, _ in zip(feed, range(3))])
feed.close()
print(threads())
""")
    assert code == 0
    assert out.replace("child\n", "") == f"{[expected] * 3}\n[]\n"
    assert out.count("child\n") >= 3 or ending == "os._exit(5)"
    assert says in err
