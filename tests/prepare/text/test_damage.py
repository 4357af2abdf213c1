"""Whatever happens to the files of an interrupted run: the next one makes the same store, or says in one line what to do."""

import os
import random
import shutil

import pytest

import millrace as mr
from millrace.testing import Fault, count_steps, run_forked, tree_digest

OPTIONS = {"val": 0.1, "workers": 1, "part_bytes": 2_000, "shard_tokens": 1_500}
STORE = ("shards", "journal.jsonl", "owner.json")  # what shards hold is the store's, which has hashes of its own


def flipped(data, rng):
    for _ in range(3):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


DAMAGES = {
    "flipped": flipped,
    "cut": lambda data, rng: data[: rng.randrange(len(data))],
    "empty": lambda data, rng: b"",
    "other bytes": lambda data, rng: rng.randbytes(len(data)),
    "other JSON": lambda data, rng: rng.choice([b"[]", b"{}", b"null", b'{"version": 5}', b"3"]),
    "other digits": lambda data, rng: bytes(
        rng.choice(b"0123456789") if byte in b"0123456789" and rng.random() < 0.2 else byte for byte in data
    ),
}


@pytest.mark.parametrize("at", [0.5, 0.7])
@pytest.mark.parametrize(
    "options",
    [{"tokenizer": "bytes"}, {"tokenizer": "char", "dedup_unit": "line"}, {"tokenizer": "bytes", "dedup": "near"}],
)
def test_any_damage_is_made_good_or_said(tmp_path, options, at):
    """MILLRACE_SOAK is how many damages are tried of each kind."""
    rng = random.Random(17)
    folder, out, partial = tmp_path / "in", tmp_path / "out", tmp_path / "out.partial"
    folder.mkdir()
    for k in range(6):
        documents = [f"document {k * (n % 3)} {n}\nline {n % 7}\n" + "abc " * (n % 20) for n in range(17)]
        (folder / f"{k}.txt").write_text("\n\n".join(documents))

    def prepare(**more):
        return mr.prepare_text(str(folder), out, **{**OPTIONS, **options, **more})

    with count_steps() as steps:
        prepare()
    expected = tree_digest(out)
    shutil.rmtree(out)
    assert run_forked(prepare, fault=Fault(int(len(steps) * at), "kill")) == -9
    shutil.copytree(partial, tmp_path / "killed")
    found = [path.relative_to(partial) for path in sorted(partial.rglob("*")) if path.is_file() and path.stat().st_size]
    files = [path for path in found if path.parts[0] not in STORE]
    tried = [
        (path, how)
        for how in DAMAGES
        for path in rng.sample(files, min(len(files), int(os.environ.get("MILLRACE_SOAK") or 3)))
    ]
    for path, how in [
        *tried,
        *((path, how) for path in files if path.suffix == ".json" and not path.parent.name for how in DAMAGES),
    ]:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(tmp_path / "killed", partial)
        (partial / path).write_bytes(DAMAGES[how](bytearray((partial / path).read_bytes()), rng))
        said = f"{partial} restart=True"
        try:
            prepare()
        except mr.ConfigError as error:
            said = str(error)
            prepare(restart=True)
        assert str(partial) in said, (path, how)
        assert "restart=True" in said, (path, how)
        assert tree_digest(out) == expected, (path, how)
