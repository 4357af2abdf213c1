"""A report as one HTML page that loads nothing: style, charts and pictures are inside it.

The page forbids scripts and everything from outside by its own policy, as well as holding none.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from millrace.report import charts
from millrace.report.blocks import (
    Bars,
    Block,
    Facts,
    Histogram,
    Lines,
    Note,
    Passages,
    Pictures,
    Report,
    Section,
    Table,
    Timeline,
)
from millrace.report.escape import visible

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
STYLE = """
:root{color-scheme:light dark;--ink:#1d2330;--dim:#667085;--page:#f6f7f9;--card:#fff;--edge:#e2e6ec;--c0:#2f6fde;--c1:#e07b22;
--c2:#2a9d6f;--c3:#9b59b6;--c4:#d1495b;--c5:#8a94a6}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--dim:#98a2b3;--page:#14171d;--card:#1c2028;--edge:#303643;--c0:#6ea0ff;
--c1:#f0a35e;--c2:#57c79a;--c3:#c79be0;--c4:#ef7d8c;--c5:#8a94a6}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px;overflow-wrap:anywhere}h1{font-size:24px;margin:0}
h2{font-size:18px;margin:0 0 2px}p{margin:0}.dim,.about{color:var(--dim)}.about{margin-bottom:14px;max-width:80ch}
nav{margin:12px 0 22px;display:flex;flex-wrap:wrap;gap:4px 16px}a{color:var(--c0);text-decoration:none}
section{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:18px 20px;margin-bottom:18px}
.blocks{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(330px,100%),1fr));gap:18px 26px;align-items:start}
.wide{grid-column:1/-1;min-width:0}figure{margin:0;min-width:0}figcaption{font-weight:600;margin-bottom:4px;overflow-wrap:anywhere}
figcaption span{font-weight:400;color:var(--dim)}svg{width:100%;height:auto;display:block;overflow:visible}
svg text{font-size:11px;fill:var(--dim);unicode-bidi:isolate}svg .name{fill:var(--ink);font-size:12px}.bar{fill:var(--c0)}
.grid,.axis{stroke:var(--edge)}.axis{stroke:var(--dim)}.mark{stroke:var(--dim);stroke-dasharray:3 3}
.curve{fill:none;stroke-width:1.6}.c0{stroke:var(--c0)}.c1{stroke:var(--c1)}.c2{stroke:var(--c2)}.c3{stroke:var(--c3)}
.dot.c0{fill:var(--c0)}.dot.c1{fill:var(--c1)}.dot.c2{fill:var(--c2)}.dot.c3{fill:var(--c3)}
.key{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12px;color:var(--dim)}.key i{display:inline-block;width:14px;height:3px;
border-radius:2px;vertical-align:middle;margin-right:5px}.k0{background:var(--c0)}.k1{background:var(--c1)}
.k2{background:var(--c2)}.k3{background:var(--c3)}.k4{background:var(--c4)}.k5{background:var(--c5)}
.f0{fill:var(--c0)}.f1{fill:var(--c1)}.f2{fill:var(--c2)}.f3{fill:var(--c3)}.f4{fill:var(--c4)}.f5{fill:var(--c5)}
table{border-collapse:collapse;font-size:14px}th{font-weight:600;color:var(--dim);text-align:left}
td,th{padding:3px 18px 3px 0;vertical-align:top;border-bottom:1px solid var(--edge);overflow-wrap:break-word}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.facts td{overflow-wrap:anywhere}.facts td:first-child{color:var(--dim);white-space:nowrap}.scroll{overflow-x:auto}
.passage{margin-bottom:14px}
.passage pre{margin:4px 0 0;padding:10px 12px;background:var(--page);border-radius:6px;
font:13px/1.45 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;max-height:300px;overflow:auto}
.end{display:block;color:var(--c1);font-weight:600;border-top:2px dashed var(--c1);margin:8px 0 4px;font-size:12px}
.grid-of{display:grid;grid-template-columns:repeat(auto-fill,minmax(112px,1fr));gap:12px}.grid-of img{width:100%;
border-radius:6px;display:block;image-rendering:auto}.grid-of div{font-size:12px;color:var(--dim);overflow-wrap:anywhere}
"""


def page(report: Report, *, refresh_s: int | None = None) -> str:
    """The whole page. With ``refresh_s`` a browser loads it again after so many seconds."""
    links = "".join(f'<a href="#s{k}">{visible(section.title)}</a>' for k, section in enumerate(report.sections))
    again = f'<meta http-equiv="refresh" content="{int(refresh_s)}">' if refresh_s else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="referrer" content="no-referrer">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{again}'
        f"<title>{visible(report.title)}</title><style>{STYLE}</style></head><body><main>"
        f'<h1><bdi>{visible(report.title)}</bdi></h1><p class="dim">{visible(report.subtitle)}</p><nav>{links}</nav>'
        + "".join(_section(k, section) for k, section in enumerate(report.sections))
        + "</main></body></html>\n"
    )


def _section(place: int, section: Section) -> str:
    blocks = "".join(_block(block) for block in section.blocks)
    about = f'<p class="about">{visible(section.about)}</p>' if section.about else ""
    return (
        f'<section id="s{place}"><h2>{visible(section.title)}</h2>{about}<div class="blocks">{blocks}</div></section>'
    )


def _block(block: Block) -> str:
    if isinstance(block, Bars):
        return _figure(block.title, block.note, charts.bars(block))
    if isinstance(block, Histogram):
        return _figure(block.title, block.note, charts.histogram(block))
    if isinstance(block, Lines):
        return _figure(block.title, block.note, charts.lines(block) + _key(list(block.curves), bool(block.marks)))
    if isinstance(block, Timeline):
        chart = charts.timeline(block) + _key(block.kinds, False)
        return _figure(block.title, "", chart).replace("<figure>", '<figure class="wide">', 1)
    if isinstance(block, Facts):
        return f'<div class="wide scroll"><table class="facts">{"".join(map(_row, block.rows))}</table></div>'
    if isinstance(block, Table):
        return _table(block.rows)
    if isinstance(block, Passages):
        return f'<div class="wide">{"".join(_passage(title, pieces) for title, pieces in block.passages)}</div>'
    if isinstance(block, Pictures):
        return f'<div class="wide grid-of">{"".join(_picture(*picture) for picture in block.pictures)}</div>'
    if isinstance(block, Note):
        return f'<p class="wide">{visible(block.text)}</p>'
    raise AssertionError(block)


def _figure(title: str, note: str, chart: str) -> str:
    said = f" <span>{visible(note)}</span>" if note else ""
    return f"<figure><figcaption><bdi>{visible(title)}</bdi>{said}</figcaption>{chart}</figure>"


def _key(names: list[str], has_marks: bool) -> str:
    if len(names) < 2 and not has_marks:
        return ""
    items = [f'<span><i class="k{k % 6}"></i><bdi>{visible(name)}</bdi></span>' for k, name in enumerate(names)]
    return f'<div class="key">{"".join(items)}{"<span>┆ started again</span>" if has_marks else ""}</div>'


def _row(cells: Sequence[str], tag: str = "td", numeric: Sequence[bool] = ()) -> str:
    marks = [' class="n"' if k < len(numeric) and numeric[k] else "" for k in range(len(cells))]
    inside = "".join(
        f"<{tag}{mark}><bdi>{visible(cell)}</bdi></{tag}>" for mark, cell in zip(marks, cells, strict=True)
    )
    return f"<tr>{inside}</tr>"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns that hold nothing but numbers are aligned to the right."""
    numeric = [all(_is_number(row[k]) for row in rows[1:]) for k in range(len(rows[0]))]
    body = "".join(_row(row, "td", numeric) for row in rows[1:])
    return f'<div class="wide scroll"><table>{_row(rows[0], "th", numeric)}{body}</table></div>'


def _is_number(cell: str) -> bool:
    return (cell[:1].isdigit() and cell[-1:] in "0123456789%KMGT") or cell[:1] == "-" or not cell


def _passage(title: str, pieces: list[str]) -> str:
    end = '<span class="end">a new document begins</span>'
    inside = end.join(f"<bdi>{visible(piece, keep=chr(10) + chr(9))}</bdi>" for piece in pieces)
    return f'<div class="passage"><bdi class="dim">{visible(title)}</bdi><pre>{inside}</pre></div>'


def _picture(caption: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f'<div><img alt="" src="data:image/png;base64,{data}"><bdi>{visible(caption)}</bdi></div>'
