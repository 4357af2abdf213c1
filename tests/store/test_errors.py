"""The tree of errors: what each is, what else it is, and that it crosses processes whole."""

import copy
import errno
import pickle

import pytest

from millrace import errors

# class -> (its parent in the tree, the builtin it also is)
TREE = {
    "ConfigError": ("MillraceError", ValueError),
    "StoreError": ("MillraceError", None),
    "StoreNotFound": ("StoreError", FileNotFoundError),
    "StoreCorrupt": ("StoreError", None),
    "StoreTooNew": ("StoreError", None),
    "StoreLocked": ("StoreError", BlockingIOError),
    "StoreWriteFailed": ("StoreError", OSError),
    "StoreUnreachable": ("StoreError", ConnectionError),
    "SourceError": ("MillraceError", None),
    "ResumeMismatch": ("MillraceError", None),
    "FeedError": ("MillraceError", None),
    "StageFailed": ("FeedError", None),
    "TrainError": ("MillraceError", None),
    "QueueError": ("MillraceError", None),
    "QueueUnreachable": ("QueueError", ConnectionError),
    "LeaseLost": ("QueueError", None),
}
ATTRIBUTES = {
    "StoreError": {"path": "/a"},
    "StoreNotFound": {"path": "/a"},
    "StoreCorrupt": {"path": "/a/b.f32", "column": "b", "expected": 12, "found": 11},
    "StoreTooNew": {"path": "/a"},
    "StoreLocked": {"path": "/a", "owner": {"pid": 7}},
    "StoreWriteFailed": {"path": "/a", "errno": errno.ENOSPC},
    "SourceError": {"source": "x.csv", "row": 3, "offset": 99},
    "ResumeMismatch": {"part": "view", "expected": "aa", "found": "bb"},
    "TrainError": {"step": 40, "samples": [3, 1]},
    "StageFailed": {"stage": "transform", "position": 81_204},
}


def classes() -> dict[str, type[BaseException]]:
    found = vars(errors).values()
    return {kind.__name__: kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseException)}


def test_the_tree_has_exactly_these_classes():
    assert set(classes()) == {"MillraceError", *TREE}
    assert errors.MillraceError.__bases__ == (Exception,)


@pytest.mark.parametrize("name", TREE)
def test_each_error_is_its_parent_and_the_builtin_it_resembles(name):
    parent, builtin = TREE[name]
    expected = (classes()[parent],) if builtin is None else (classes()[parent], builtin)
    assert classes()[name].__bases__ == expected


@pytest.mark.parametrize("name", TREE)
def test_the_tree_in_the_docstring_says_the_same(name):
    _, builtin = TREE[name]
    assert errors.__doc__ is not None
    shown = name if builtin is None else f"{name}({builtin.__name__})"
    words = errors.__doc__.replace("├──", " ").replace("└──", " ").split()
    assert shown in words


@pytest.mark.parametrize("name", TREE)
def test_an_unset_attribute_is_none(name):
    error = classes()[name]("broken")
    assert [getattr(error, key) for key in ATTRIBUTES.get(name, {})] == [None] * len(ATTRIBUTES.get(name, {}))


@pytest.mark.parametrize("name", ["MillraceError", *TREE])
@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"])  # noqa: S301
def test_message_and_attributes_survive_between_processes(name, copied):
    attributes = ATTRIBUTES.get(name, {})
    error = copied(classes()[name]("what; remedy", **attributes))
    assert type(error) is classes()[name]
    assert str(error) == "what; remedy"
    assert error.args == ("what; remedy",)
    assert {key: getattr(error, key) for key in attributes} == attributes


def test_users_may_catch_the_builtin():
    with pytest.raises(FileNotFoundError):
        raise errors.StoreNotFound("no store", path="/a")
    with pytest.raises(ValueError, match="lookback"):
        raise errors.ConfigError("lookback=96")
    with pytest.raises(ConnectionError):
        raise errors.QueueUnreachable("no server")
    with pytest.raises(BlockingIOError):
        raise errors.StoreLocked("held")


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "free space"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "writable"),
        (errno.EACCES, "permission"),
        (errno.EPERM, "permission"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EIO, "check the disk"),
    ],
)
def test_a_refused_write_names_path_cause_and_remedy(code, remedy):
    error = errors.write_failed(OSError(code, "whatever"), "/a/b", "writing")
    assert isinstance(error, OSError)
    assert error.errno == code
    assert error.path == "/a/b"
    for part in ("writing /a/b", remedy, "run the same command again"):
        assert part in str(error)
