"""The flags of earlier scripts, which are accepted as they were and shown nowhere."""

from __future__ import annotations

import os

PREPARE_TEXT = {
    "--out_dir": "--out",
    "--tokenization": "--tokenizer",
    "--tokens_per_shard": "--shard-tokens",
    "--no_normalize": "--no-normalize",
    "--no_dedup": "--no-dedup",
}
TRAIN = {"--dataset-dir": "--store", "--input-file": "--input"}
VALUED = {"--run", "--ranks", "--resume", "--metrics-port", "--profile", "--set", *TRAIN.values()}  # a value follows
SOURCES, CONFIG, STEPS, NAME = "--input_files", "--config-file", "--max-iters", "--model-name"


def modern(arguments: list[str]) -> list[str]:
    """Arguments with the flags of earlier scripts rewritten: ``--input_files a b`` becomes ``a b``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given, rest = arguments[:end], arguments[end:]
    if given[:2] == ["prepare", "text"]:
        return [*_prepare_text(given), *rest]
    if given[:1] == ["train"] and {word.partition("=")[0].replace("_", "-") for word in given} & {
        *TRAIN,
        CONFIG,
        STEPS,
        NAME,
    }:
        return ["train", *_train(given[1:]), *rest]
    return arguments


def _prepare_text(arguments: list[str]) -> list[str]:
    new = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag == SOURCES:
            new += [value] if equals else []
        else:
            new.append(PREPARE_TEXT.get(flag, flag) + equals + value)
    return new


def _train(arguments: list[str]) -> list[str]:
    """``--config-file C --max-iters 9`` becomes ``C --set train.max_steps=9``; the rest stays as it is."""
    new: list[str] = []
    configs: list[str] = []
    names: list[str] = []
    words = iter(arguments)
    for argument in words:
        flag, equals, value = argument.partition("=")
        earlier = flag.replace("_", "-")
        flag = TRAIN.get(earlier, earlier if earlier in (CONFIG, STEPS, NAME) else flag)
        if flag not in (CONFIG, STEPS, NAME, *VALUED):
            (new if argument.startswith("-") else configs).append(argument)
            continue
        value = value if equals else next(words, "")
        if flag == STEPS:
            new += ["--set", f"train.max_steps={value}"]
        elif flag in (CONFIG, NAME):
            (configs if flag == CONFIG else names).append(value)
        else:
            new += [flag, value]
    return [*configs, *_named(names, bool(configs)), *new]


def _named(names: list[str], has_config: bool) -> list[str]:
    """What ``--model-name`` said: the configuration where none is given, else the model, else the name of the run."""
    from millrace.train.settings import OWN_MODELS

    new = []
    for name in names:
        if not has_config:
            new.append(name)
        elif name in OWN_MODELS or ":" in name:
            new += ["--set", f"model.kind={name}"]
        else:
            new += ["--run", os.path.join("runs", name)]
    return new
