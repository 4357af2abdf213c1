"""The sizing arithmetic, against a simulation of its parts and against figures worked out by hand."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.cli import run as millrace
from millrace.queues.open import open_queue
from millrace.queues.protocol import Offer
from millrace.queues.sizing import MANIFEST_BYTES, RUN_KEYS, Corpus, Need, simulated_rate


@given(
    gpus=st.integers(1, 16), step_ms=st.integers(20, 400), make_ms=st.integers(1, 400), batch=st.integers(1 << 16, 8 << 20),
    workers=st.integers(1, 40), servers=st.integers(1, 3),
)  # fmt: skip
def test_the_slowest_part_sets_the_rate(gpus, step_ms, make_ms, batch, workers, servers):
    need = Need(gpus, step_ms, batch, make_ms, depth=64)  # enough tickets for every part to be busy
    expected = min(need.batches_per_s, workers * 1000 / make_ms, servers * need.server_rate)
    assert simulated_rate(need, workers, servers, steps=400) == pytest.approx(expected, rel=0.15)


def test_what_is_planned_is_enough_and_a_quarter_less_is_not():
    need = Need(gpus=64, step_ms=200, batch_bytes=4 << 20, make_ms=150)
    workers = need.remote_cores
    assert (workers, need.servers, need.batches_per_s) == (48, 3, 320)
    assert simulated_rate(need, workers, need.servers) == pytest.approx(320, rel=0.05)
    assert simulated_rate(need, workers * 3 // 4, need.servers) == pytest.approx(240, rel=0.05)
    assert simulated_rate(need, workers, need.servers - 1) < 0.8 * 320


def test_cores_beside_the_gpus_come_first():
    assert Need(64, 200, 1 << 20, 20, cores_per_host=8).remote_cores == 0
    assert Need(64, 200, 1 << 20, 300, cores_per_host=8).remote_cores == 96 - 64


def test_a_trillion_tokens_over_a_thousand_ranks():
    """Tickets and keys at a time do not grow with the run; the tables of the store are small."""
    corpus, need = Corpus(1e12, batch_tokens=8 * 4096), Need(1000, 500, 8 * 4096 * 16, 1)
    assert corpus.tickets == 30_517_579
    assert (need.tickets, need.leases, need.keys) == (4000, 2, 4000 + 1000 + 3 * RUN_KEYS)
    assert (corpus.shards, corpus.shard_table_bytes) == (100_000, 3_200_000)
    assert corpus.hash_table_bytes == 100_000 * (5 + 4) * 8  # 20 MB of tokens, and four small files
    assert corpus.store_bytes == 2 * 10**12 + 36 * 10**9 + 8 * 100_000


def test_threads_of_workers_are_tickets_of_every_rank():
    assert Need(gpus=64, step_ms=200, batch_bytes=4 << 20, make_ms=150).ahead == 48 // 3
    assert Need(gpus=64, step_ms=200, batch_bytes=1 << 10, make_ms=5000).ahead == 256


def test_sizes_on_disk_are_those_of_a_real_store(tmp_path):
    letters = np.random.default_rng(0).integers(97, 123, (7_500, 999), np.uint8)
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": row.tobytes().decode()}) + "\n" for row in letters)
    )
    mr.prepare_text(tmp_path / "texts.jsonl", tmp_path / "store", tokenizer="bytes", shard_tokens=3_000_000, val=0)
    store = mr.open_store(tmp_path / "store")
    corpus = Corpus(7_500_000, batch_tokens=1, document_tokens=1000, shard_tokens=3_000_000)
    shards = list((tmp_path / "store" / "shards").iterdir())
    assert corpus.shards == len(shards) == 3
    assert corpus.shard_table_bytes == (tmp_path / "store" / "shards.bin").stat().st_size
    assert corpus.hash_table_bytes == (tmp_path / "store" / "hashes.bin").stat().st_size
    assert corpus.store_bytes == sum(file.stat().st_size for shard in shards for file in shard.iterdir())
    assert (tmp_path / "store" / "store.json").stat().st_size <= MANIFEST_BYTES
    assert store.num_rows == 7_500_000


def test_a_server_has_the_keys_that_are_planned(server):
    """At the worst moment: all payloads of each rank but two, of which one is leased and one waits."""
    need, tickets = Need(gpus=2, step_ms=1000, batch_bytes=1, make_ms=1000, depth=8), []
    queue = open_queue(server.url)
    for link in ("a", "b"):
        wanted = [f"{link}-1:{first}:1" for first in range(need.ahead)]
        queue.offer("exp1", link, "/exp1", [Offer(f"{link}-1", b"record", wanted)])
    while len(tickets) < need.tickets - 1:
        tickets.append(queue.lease("exp1", "worker", {"threads": 1}).ticket)
    for ticket in tickets[:-1]:
        queue.put("exp1", "worker", ticket, b"payload")
    assert server.client().dbsize() == need.keys - 2
    queue.close()


def test_the_command(capsys):
    command = ["plan", "--gpus", "64", "--step-ms", "200", "--batch-mib", "4", "--make-ms", "150"]
    assert millrace(command) == 0
    shown = capsys.readouterr().out
    assert "320 batches/s" in shown
    assert "48 cores on other machines" in shown
    assert "3 Redis servers" in shown
    assert millrace([*command, "--cores-per-host", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["remote_cores"] == 0
    assert millrace([*command, "--tokens", "1e12", "--batch-tokens", "32768", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["corpus"]["hash_table_bytes"] == 7_200_000
    assert millrace([*command, "--tokens", "1e12", "--batch-tokens", "32768", "--document-tokens", "100"]) == 0
    shown = capsys.readouterr().out
    assert "1,024 tickets (16 a rank), 48 of them leased, and 1,115 keys" in shown
    assert "2.1 TiB in 100,000 shards; shards.bin 3.1 MiB" in shown


def test_the_figures_of_the_guide(capsys):
    page = (Path(__file__).parents[2] / "docs" / "guide" / "scale-out.md").read_text()
    command, said = re.search(r"\$ millrace (plan --gpus 1000.*?)\n```\n\n(.*?)\n\n", page, re.DOTALL).groups()
    assert millrace(command.replace("\\\n", "").split()) == 0
    shown, said = capsys.readouterr().out, " ".join(said.split())
    for figure in (
        "122,070,313 tickets",
        "10,000 tickets",
        "11,009 keys",
        "1.9 TiB in 100,000 shards",
        "3.1 MiB",
        "6.9 MiB",
    ):
        assert figure in shown
        assert figure in said
