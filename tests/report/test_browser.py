"""Pages in a real browser: whatever the names in the data are, no script runs and nothing is requested."""

import html
import json
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

import millrace as mr
from millrace.report.blocks import Report
from millrace.report.html import page
from millrace.report.runs import run_report
from millrace.report.stores import store_report
from millrace.report.timeline import Step, timeline_report

OUT = "http://outside.example"
HOSTILE = (
    f"</title></style></script><script>fetch('{OUT}/hit-fetch');document.title='hit'</script>"
    f"<img src={OUT}/hit-image onerror=fetch('{OUT}/hit-error')>\"'><svg onload=fetch('{OUT}/hit-svg')></svg>"
    f"<link rel=stylesheet href={OUT}/hit-style><iframe src={OUT}/hit-frame></iframe>"
)
# It shows the page in a frame, asks for an image and runs a script itself (so these can be seen), and copies the page's text.
AROUND = f"""<!DOCTYPE html><img src="{OUT}/control-image"><script>fetch("{OUT}/control-fetch", {{mode: "no-cors"}})</script>
<iframe src="/page" onload="
const page = this.contentDocument, all = page.documentElement;
document.body.append(page.title + ' ### ' + (all.scrollWidth - all.clientWidth) + ' ### ' + page.body.innerText)"></iframe>"""


class Outside(BaseHTTPRequestHandler):
    """Answers for every host, and notes what was asked for."""

    def do_GET(self):
        self.server.asked.append(self.path)
        body = {"/": AROUND, "/page": self.server.page}.get(self.path, "").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def hostile_reports(folder):
    """Reports of every kind, whose names are all hostile."""
    columns = {"tokens": mr.Column("uint16"), "source": mr.Column("string", per="record")}
    with mr.StoreWriter(folder / "text", kind="text", columns=columns) as writer:
        for k in range(3):
            writer.append({"tokens": np.arange(5, dtype=np.uint16), "source": f"{'y' * 200}{HOSTILE}/{k}.{HOSTILE}"})
    meta = {"features": [HOSTILE]}
    series = mr.from_arrays({"values": np.ones((200, 1)), "name": [HOSTILE]}, [0, 200], kind="series", meta=meta)
    columns = {"hits": mr.Column("float32"), "label": mr.Column("int64", per="record")}
    with mr.StoreWriter(folder / "rec", kind="records", columns=columns, meta={"classes": [HOSTILE]}) as writer:
        writer.append({"hits": np.ones(2, np.float32), "label": 0})
    (folder / "run").mkdir()
    (folder / "run/metrics.jsonl").write_text(json.dumps({"step": 1, HOSTILE: 2.0, "verdict": HOSTILE}) + "\n")
    yield store_report(mr.open_store(folder / "text"))
    yield store_report(series)
    yield store_report(mr.open_store(folder / "rec"))
    yield run_report(folder / "run")
    yield timeline_report(HOSTILE, [Step(1, 0.2, [("data wait", 0.0, 0.1)])], waits=False)


@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs Debian's chromium; `make servers` as root installs it"
)
def test_hostile_names_run_nothing_and_request_nothing(tmp_path):
    sections = [section for report in hostile_reports(tmp_path) for section in report.sections]
    server = ThreadingHTTPServer(("127.0.0.1", 0), Outside)
    server.asked, server.page = [], page(Report(HOSTILE, HOSTILE, sections))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]
    options += [
        f"--host-resolver-rules=MAP * 127.0.0.1:{server.server_port}",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    try:
        shown = subprocess.run(
            ["chromium", *options, "--virtual-time-budget=2000", "--dump-dom", f"{OUT}/"],
            capture_output=True, text=True, timeout=100, check=True,
        ).stdout  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    ours = [path for path in server.asked if "control" in path or "hit" in path]
    assert set(ours) == {"/control-image", "/control-fetch"}, ours  # the browser asks and runs, but not for the page
    title, beyond, text = html.unescape(shown.partition("</iframe>")[2]).split(" ### ")
    assert beyond == "0"  # nothing runs out of a page 300 pixels wide
    assert "</title></style></script><script>fetch(" in title  # the whole name is the title
    for heading in ("Overview", "Example windows", "Passages", "Labels and values", "Curves", "Timeline"):
        assert heading in text
    assert text.count("<script>fetch(") > 10
