"""``millrace doctor``: what this installation has, and what is missing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

EXAMPLE = "millrace doctor"


def run(as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False) -> None:
    """Show versions, the C core, and this machine's limits."""
    from millrace.cli.console import print_fields, print_json

    facts = examine()
    if as_json:
        print_json(facts)
    else:
        print_fields([(name, "not installed" if value is None else str(value)) for name, value in facts.items()])


def examine() -> dict[str, Any]:
    import platform as python_platform
    from importlib.metadata import PackageNotFoundError, version

    from millrace import __version__
    from millrace.native import num_cores
    from millrace.store import lock, platform

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    has_core = platform.HAS_CORE
    optional = ("numpy", "torch", "pyarrow", "tokenizers", "redis", "matplotlib")
    return {
        "millrace": __version__,
        "python": python_platform.python_version(),
        "C core": "in use"
        if has_core
        else "not built, so numpy is used, which is slower; install a C compiler, then reinstall millrace",
        "file lock": "flock" if lock.HAS_FLOCK else "lease file with heartbeat (no flock on this platform)",
        "cores": num_cores(),
        "open files": platform.descriptor_limit(),
        **{name: installed(name) for name in optional},
    }
