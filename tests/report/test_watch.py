"""``millrace watch``: one page over HTTP, for this machine and this address alone, which follows the run."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest

from millrace.cli import run as command
from millrace.report.watch import Watch


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 5.0}) + "\n")
    return tmp_path


@pytest.fixture
def watch(folder):
    watch = Watch(str(folder))
    thread = threading.Thread(target=watch.serve)
    thread.start()
    yield watch
    watch.stop()
    thread.join()
    watch.close()


def ask(watch, path=None, method="GET", host=None):
    """The answer, as its status, headers and text; the path goes out as it is."""
    place, own = re.fullmatch(r"http://([\d.:]+)(/[\w-]+/)", watch.url).groups()
    connection = http.client.HTTPConnection(place, timeout=30)
    connection.putrequest(method, own if path is None else path.replace("OWN", own), skip_host=True)
    connection.putheader("Host", place if host is None else host)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, dict(answer.getheaders()), text


def test_the_page_follows_the_run(watch, folder):
    status, headers, text = ask(watch)
    assert status == 200
    assert "up to step 1." in text
    assert '<meta http-equiv="refresh" content="2">' in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 2, "loss": 4.0}) + "\n")
    assert "up to step 2." in ask(watch)[2]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')  # a line that is being written
    assert "up to step 2." in ask(watch)[2]
    assert ask(watch, method="HEAD")[2] == ""
    for path in folder.iterdir():
        path.unlink()
    assert "is not the folder of a training run" in ask(watch)[2]


@pytest.mark.parametrize(
    "path",
    ["/", "/wrong/", "OWNmetrics.jsonl", "OWN../metrics.jsonl", "/../../etc/passwd", "OWN%2e%2e/", "OWN?a", "//"],
)
def test_nothing_else_can_be_asked_for(watch, path):
    status, _, text = ask(watch, path)
    assert (status, text.count("\n")) == (404, 1)


def test_other_sites_and_other_methods_are_refused(watch):
    assert ask(watch, host="evil.example")[0] == 403  # a name of a site that leads to this machine
    assert ask(watch, host="")[0] == 403
    port = watch.url.split(":")[2].split("/")[0]
    assert ask(watch, host=f"localhost:{port}")[0] == 200  # through ssh -L
    assert {ask(watch, method=method)[0] for method in ("POST", "PUT", "DELETE", "OPTIONS")} == {501}


def test_a_folder_without_a_run_and_a_port_in_use_are_one_line(watch, tmp_path, capsys):
    (tmp_path / "none").mkdir()
    assert command(["watch", str(tmp_path / "none")]) == 1
    port = watch.url.split(":")[2].split("/")[0]
    assert command(["watch", str(tmp_path), "--port", port]) == 1
    missing, used = capsys.readouterr().err.splitlines()
    assert "give what --run was" in missing
    assert f"--port {port} cannot be used" in used


def test_ctrl_c_ends_the_command(folder):
    arguments = [sys.executable, "-m", "millrace", "watch", str(folder)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout.readline().startswith(f"{folder} is at http://127.0.0.1:")
    assert "Ctrl-C" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.startswith("interrupted; run it again with: ")
    assert errors.count("\n") == 1
