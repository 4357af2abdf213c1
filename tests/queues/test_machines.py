"""Two machines: namespaces of the network, joined by a cable. Redis and the trainer are on one, a worker on the other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.testing.servers import find_server

from .conftest import LONG_S, OPTIONS, until

ADDRESSES = {"trainer": "10.77.0.1", "worker": "10.77.0.2"}
SECRET = "correct-horse-battery"
TRAINER = """
import sys
from pathlib import Path
import millrace as mr
from tests.queues.conftest import Trainer

store, folder, url, options = sys.argv[1:]
trainer = Trainer(mr.Blocks(mr.open_store(store), length=256), Path(folder), url, options)
trainer.take_from_workers(20)
trainer.take(20)
print(f"{trainer.by_workers} of {trainer.num_taken}")
trainer.close()
"""


def command(*words):
    subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines():
    """Name -> what runs a command there. They are taken away with their cable, whatever happened."""
    names = {name: f"millrace-{os.getpid()}-{name}" for name in ADDRESSES}
    try:
        for name in names.values():
            command("ip", "netns", "add", name)
        ends = [("eth0", "netns", name) for name in names.values()]
        command("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for machine, name in names.items():
            command("ip", "-n", name, "address", "add", f"{ADDRESSES[machine]}/24", "dev", "eth0")
            command("ip", "-n", name, "link", "set", "eth0", "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
        yield {machine: ["ip", "netns", "exec", name] for machine, name in names.items()}
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.fixture
def url(machines, tmp_path):
    """Redis on the trainer's machine, with TLS and a password as over any network."""
    address, pem, key, log = ADDRESSES["trainer"], tmp_path / "ca.pem", tmp_path / "server.key", tmp_path / "redis.log"
    command(
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", 2, "-subj", f"/CN={address}",
        "-addext", f"subjectAltName=IP:{address}", "-keyout", key, "-out", pem,
    )  # fmt: skip
    tls = ["--tls-cert-file", pem, "--tls-key-file", key, "--tls-ca-cert-file", pem, "--tls-auth-clients", "no"]
    server = subprocess.Popen(
        [*machines["trainer"], find_server(), "--port", "0", "--tls-port", "6379", "--bind", address, *tls,
         "--requirepass", SECRET, "--save", "", "--dir", tmp_path, "--logfile", log],
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until(lambda: log.exists() and "Ready to accept" in log.read_text(), "that the server answers")
        yield f"rediss://{address}:6379/0"
    finally:
        server.kill()
        server.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces of the network")
def test_a_worker_on_another_machine(machines, url, view, start_worker, tmp_path, monkeypatch):
    (tmp_path / "password").write_text(SECRET)
    monkeypatch.setenv("MILLRACE_REDIS_PASSWORD_FILE", str(tmp_path / "password"))
    options = f"{OPTIONS}&ca={tmp_path / 'ca.pem'}"
    worker = start_worker(url, options=options, before=machines["worker"])
    trained = subprocess.run(
        [*machines["trainer"], sys.executable, "-c", TRAINER, view.stores[0].path, tmp_path, url, options],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=2 * LONG_S,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    made, taken = map(int, trained.stdout.split(" of "))
    assert 20 <= made <= taken
    said, _ = worker.communicate(timeout=LONG_S)
    assert worker.returncode == 0, said
    assert "run exp1 has ended; made" in said
