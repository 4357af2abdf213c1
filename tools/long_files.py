"""Reports files over 300 lines, for `make check`: past that, look for the noun that is missing."""

from pathlib import Path

LIMIT = 300
long = [
    (len(path.read_text().splitlines()), path)
    for folder in ("src", "tests", "benchmarks", "tools")
    for pattern in ("*.py", "*.c", "*.h")
    for path in Path(folder).rglob(pattern)
]
for lines, path in sorted((entry for entry in long if entry[0] > LIMIT), reverse=True):
    print(f"{path}: {lines} lines, more than {LIMIT}; is there a noun missing?")
