"""``millrace doctor``: what this installation has, and what it lacks."""

from __future__ import annotations

from typing import Any

from millrace.cli import options

EXAMPLE = "millrace doctor"
NO_CORE = "not built, so numpy is used, which is slower; install a C compiler, then reinstall millrace"


def run(as_json: options.Json = False) -> None:
    """Show versions, the C core, and the limits of this machine."""
    from millrace.cli.printing import print_json, print_line

    facts = examine()
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        print_line(f"{name.ljust(max(map(len, facts)))}  {'not installed' if value is None else value}")


def examine() -> dict[str, Any]:
    import platform as python_platform

    from millrace import __version__
    from millrace.native import num_cores
    from millrace.store import lock, platform
    from millrace.store.publish import installed

    optional = ("numpy", "torch", "pyarrow", "tokenizers", "redis", "matplotlib")
    return {
        "millrace": __version__,
        "python": python_platform.python_version(),
        "C core": "in use" if platform.HAS_CORE else NO_CORE,
        "file lock": "flock" if lock.HAS_FLOCK else "lease file with heartbeat (no flock on this platform)",
        "cores": num_cores(),
        "open files": platform.descriptor_limit(),
        **{name: installed(name) for name in optional},
    }
