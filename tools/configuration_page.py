"""Prints ``docs/guide/configuration.md``: python tools/configuration_page.py > docs/guide/configuration.md."""

from __future__ import annotations

import sys

from millrace.train.keys import every_key, sections, toml

INTRODUCTION = """\
# Configuration

A configuration is a TOML file with the keys below. Leave out what should keep its default.
`--set train.batch=64` changes a key for one run. This page is made from the code. The same
reference on a terminal, and for machines:

```console
$ millrace train --keys
$ millrace train --keys --json
```

The presets are such files. Python reads them, and checks every key and value:

```python
from millrace.train.config import load_config

print(load_config("nano", ["train.batch=64"]).train)
```
"""


def page() -> str:
    """The text of the page."""
    parts = [INTRODUCTION]
    for section, about in sections().items():
        rows = [
            f"| `{key.name}` | {key.type} | `{toml(key.default)}` | {key.meaning} |"
            for key in every_key()
            if key.name.startswith(f"{section}.")
        ]
        heading = [f"## [{section}]", "", about, "", "| key | takes | default | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([*heading, *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
