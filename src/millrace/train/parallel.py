"""The model as ranks call it: alone, in DDP, or sharded in place by FSDP2."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from millrace.train.dist import World
from millrace.train.models.layers import Layers
from millrace.train.settings import Config


def distribute(model: nn.Module, config: Config, world: World) -> nn.Module:
    """The module to call ``forward`` on. fsdp2 changes the model itself: its parameters become shards."""
    if config.train.compile:
        model.compile()
    if world.size == 1:
        return model
    if config.train.parallel == "fsdp2":
        shard(model, world)
        return model
    # share_buffers does it after every step. Torch 2.13 renamed the option and warns about the old name.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    options: Any = {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}
    return DistributedDataParallel(model, **options)


def share_buffers(model: nn.Module, world: World) -> None:
    """Gives all ranks the buffers of the first, such as those of a BatchNorm: these are evaluated and saved."""
    buffers = [buffer for buffer in model.buffers() if buffer.numel()] if world.size > 1 else []
    if not buffers:
        return
    parts = [buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers]  # bytes fit into one message
    shared = torch.cat(parts)
    distributed.broadcast(shared, 0)
    for buffer, part in zip(buffers, torch.split(shared, [len(part) for part in parts]), strict=True):
        # A copy, because bytes in the middle may not be aligned for this type.
        buffer.detach().copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def shard(model: nn.Module, world: World) -> None:
    """Shards every layer as a unit of its own, and the rest as another."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for module in list(model.modules()):
        if isinstance(module, Layers):
            for layer in module:
                fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
