"""Copies a model and its optimiser to and from the named tensors of a checkpoint, whole or sharded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from millrace.errors import ConfigError
from millrace.store import platform
from millrace.train.checkpoint import Parts
from millrace.train.state import State
from millrace.train.tensors import NAMES, hash_file, read_tensors


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Every tensor of a training state by part and name. Names are those of the bare model."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after an evaluation the outermost parameters are still whole, and other objects
    parameters = dict(model.named_parameters())
    assert set(optimizer.state) <= set(parameters.values()), "a parameter has optimiser state but no name"
    state = {
        f"{name}.{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    return {"model": dict(model.state_dict()), "optimizer": state}


def check_trainable(model: nn.Module, kind: str) -> None:
    """Refuses a model with nothing to train, or with something that cannot be saved."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model.kind = {kind!r} has no parameters that can be trained; expected at least one")
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor) or value.dtype not in NAMES:
            what = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"model.kind = {kind!r}: {name} is {what}, which a checkpoint cannot hold; register it with persistent=False, "
                "or as real numbers (torch.view_as_real)"
            )


def circle_in(model: nn.Module, name: str = "", above: tuple[nn.Module, ...] = (), seen: Any = None) -> str | None:
    """The name of a module that holds one of those above it: then no function of torch over all modules ends."""
    seen = set() if seen is None else seen
    if any(model is each for each in above):
        return name
    if model in seen:
        return None
    seen.add(model)
    parts = [(part, child) for part, child in model._modules.items() if child is not None]
    circles = (circle_in(child, f"{name}.{part}".lstrip("."), (*above, model), seen) for part, child in parts)
    return next((circle for circle in circles if circle is not None), None)


def copy_whole(parts: Parts, copies: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Copies tensors to the host, into the memory of the copies before where it fits."""
    for part, tensors in parts.items():
        own = copies.setdefault(part, {})
        for name, value in tensors.items():
            before = own.get(name)
            if before is None or before.shape != value.shape or before.dtype != value.dtype:
                # Pinned: a GPU then writes at the speed of its bus, and does not wait for each tensor.
                own[name] = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            own[name].copy_(value.detach(), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


def copy_shards(parts: Parts) -> dict[str, dict[str, Tensor]]:
    """Copies this rank's shards to the host, as torch.distributed.checkpoint does for asynchronous saving."""
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    copies: dict[str, dict[str, Tensor]] = BlockingAsyncStager().stage(dict(parts))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copies


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def write_shards(parts: Parts, folder: Path, group: Any) -> None:
    """Writes this rank's shards as safetensors. If one rank fails, all ranks raise its error."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    for part, tensors in parts.items():
        if tensors:
            writer = HuggingFaceStorageWriter(str(folder / part), save_distributed=True)
            try:
                save(dict(tensors), storage_writer=writer, process_group=group)
            except CheckpointException as error:  # it is no Exception, so no handler above would see it
                failures = [failure for failure, _ in error.failures.values()]
                raise next((each for each in failures if isinstance(each, OSError)), failures[0]) from error


def sync_shards(parts: Parts, folder: Path) -> dict[str, str]:
    """Makes the shards of all ranks durable; returns their hashes."""

    hashes = {}
    for part in parts:
        for path in sorted((folder / part).glob("*.safetensors")):
            fd = os.open(path, os.O_RDONLY)
            try:
                platform.sync(fd, path)
            finally:
                os.close(fd)
            hashes[f"{part}/{path.name}"] = hash_file(path)
        if (folder / part).is_dir():
            platform.sync_dir(folder / part)
    return hashes


def load(folder: Path, state: State, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Loads a checkpoint into a model, and its optimiser if given. Both sides may be sharded or whole."""
    _check_names(folder, state, model)
    parts = _read(folder, state, model, optimizer)
    model.load_state_dict(parts["model"])
    if optimizer is not None:
        _load_optimizer(optimizer, model, parts["optimizer"])


def _check_names(folder: Path, state: State, model: nn.Module) -> None:
    own = {name: list(value.shape) for name, value in model.state_dict().items()}
    saved = {name: shape for name, (_, shape) in state.tensors["model"].items()}
    different = [name for name in sorted({*own, *saved}) if own.get(name) != saved.get(name)]
    if different:
        first = different[0]
        raise ConfigError(
            f"{folder} holds another model: {first} is {saved.get(first, 'missing')} there and {own.get(first, 'missing')} here; "
            "use the model the run was started with, or another --run"
        )


def _read(folder: Path, state: State, model: nn.Module, optimizer: Optimizer | None) -> dict[str, dict[str, Tensor]]:
    wanted = ("model",) if optimizer is None else ("model", "optimizer")
    if not state.is_sharded and not is_sharded(model):
        return {part: read_tensors(folder / f"{part}.safetensors") for part in wanted}
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

    parts = {part: _templates(part, state, model) for part in wanted}
    for part in filter(parts.get, wanted):
        place = folder / part if state.is_sharded else folder
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a single process may read alone
            reader = HuggingFaceStorageReader(str(place))
            load_sharded(parts[part], storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    return parts


def _templates(part: str, state: State, model: nn.Module) -> dict[str, Tensor]:
    """Tensors to read into, laid out like the model's. Those with another shape than their parameter are whole."""
    own: Mapping[str, Any] = dict(model.state_dict())
    parameters = dict(model.named_parameters())
    templates: dict[str, Tensor] = {}
    for name, (dtype, shape) in state.tensors[part].items():
        like = own.get(name) if part == "model" else parameters.get(name.rpartition(".")[0])
        if like is not None and list(like.shape) == shape:
            templates[name] = torch.zeros_like(like.detach())
        else:
            templates[name] = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    return templates


def _load_optimizer(optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    values: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition(".")
        values.setdefault(parameter, {})[key] = tensor
    own = optimizer.state_dict()
    state = {}
    for saved, group in zip(own["param_groups"], optimizer.param_groups, strict=True):
        for index, parameter in zip(saved["params"], group["params"], strict=True):
            if names[id(parameter)] in values:
                state[index] = values[names[id(parameter)]]
    optimizer.load_state_dict({"state": state, "param_groups": own["param_groups"]})
