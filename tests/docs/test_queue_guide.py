"""The guide to workers on other machines, followed as it stands: its certificate, its server with ACL and TLS, its commands."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.testing.servers import RedisServer

PAGE = (Path(__file__).parents[2] / "docs/guide/queue.md").read_text()
LONG_S = 100


def block(kind, holds=""):
    return next(text for text in re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) if holds in text)


def command(host, starts, text):
    lines = block("console", text).replace("\\\n", "").splitlines()
    return next(shlex.split(line.partition("$ ")[2]) for line in lines if line.startswith(f"{host}$ {starts}"))


@pytest.mark.skipif(
    shutil.which("redis-server") is None or shutil.which("openssl") is None,
    reason="needs Debian's redis-server, which has TLS, and openssl; `make servers` as root installs them",
)
def test_a_trainer_and_two_workers_with_acl_and_tls(tmp_path):
    (tmp_path / "train.py").write_text(block("python", "def augment"))
    (tmp_path / "password").write_text("change-me\n")
    (tmp_path / "users.acl").write_text(block("acl"))
    here = [word.replace("DNS:trainer.example", "IP:127.0.0.1") for word in command("server", "openssl", "x509")]
    subprocess.run(here, cwd=tmp_path, check=True, capture_output=True)
    conf = re.sub(r"^(tls-)?port .*\n", "", block("conf"), flags=re.MULTILINE)
    conf = re.sub(r" (ca\.pem|server\.key|users\.acl)$", rf" {tmp_path}/\1", conf, flags=re.MULTILINE)
    options = [word for line in conf.splitlines() for word in shlex.split(f"--{line}")]
    with RedisServer(*options, tls={"ca-cert-file": str(tmp_path / "ca.pem")}) as server:
        url = re.search(r"rediss://[^']*", block("console", "export QUEUE")).group()
        url = url.replace("trainer.example:6379", f"127.0.0.1:{server.port}")
        environment = {**os.environ, "MILLRACE_REDIS_PASSWORD_FILE": "password", "QUEUE": f"{url}&deadline_s=30"}
        worker = command("worker1", "millrace worker", "export QUEUE")
        worker = [sys.executable, "-m", *(url if word.startswith("rediss:") else word for word in worker)]
        shared = {
            "cwd": tmp_path,
            "env": environment,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }
        # The first start makes the store; nobody works for it yet.
        assert (
            "this process made"
            in subprocess.run([sys.executable, "train.py"], timeout=LONG_S, check=True, **shared).stdout
        )
        workers = [subprocess.Popen(worker, **shared) for _ in range(2)]
        try:
            while b"waiting" not in b"".join(os.read(each.stdout.fileno(), 100) for each in workers):
                assert all(each.poll() is None for each in workers)
            trainer = subprocess.run([sys.executable, "train.py"], timeout=LONG_S, check=False, **shared)
            assert trainer.returncode == 0, trainer.stdout
            assert int(re.search(r"workers made ([\d,]+) batches", trainer.stdout).group(1).replace(",", "")) > 0
            for each in workers:
                assert "run exp1 has ended" in each.communicate(timeout=LONG_S)[0]
        finally:
            for each in workers:
                each.kill()
                each.wait()
                each.stdout.close()
        status = command("trainer", "millrace queue status", "queue status")
        status = [sys.executable, "-m", *(url if word.startswith("redis:") else word for word in status)]
        assert "no run is here" in subprocess.run(status, timeout=LONG_S, check=True, **shared).stdout  # it has ended
