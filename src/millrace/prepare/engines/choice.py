"""Chooses the engine that ``--engine`` names."""

from __future__ import annotations

from millrace.distribution import install_command
from millrace.errors import ConfigError
from millrace.native import num_cores
from millrace.prepare.engines.engine import Engine
from millrace.prepare.engines.local import Workers
from millrace.prepare.engines.threads import Threads

NAMES = ("local", "ray", "dask")


def open_engine(
    name: str, address: str | None, workers: int | None, stall_s: float, *, in_threads: bool = False
) -> Engine:
    """The engine of this name; it starts or connects to nothing before its first task.

    ``workers`` is the most tasks at once. None: as many as there are cores here, or CPUs in the cluster at ``address``.
    ``in_threads`` says that tasks release the GIL and run no code of the user's.
    """
    if name not in NAMES:
        raise ConfigError(f"--engine {name!r}; expected local, ray or dask")
    if name == "local":
        if address is not None:
            raise ConfigError(
                f"--address {address} is for clusters; choose --engine ray or --engine dask, or leave it out"
            )
        count = workers or num_cores()
        return Threads(count) if in_threads else Workers(count, stall_s)
    try:
        if name == "ray":
            from millrace.prepare.engines.on_ray import RayCluster

            return RayCluster(workers, address, stall_s)
        from millrace.prepare.engines.on_dask import DaskCluster

        return DaskCluster(workers, address, stall_s)
    except ModuleNotFoundError as error:
        raise ConfigError(f"--engine {name} needs {error.name}; {install_command(name)}") from error
