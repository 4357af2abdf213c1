"""``millrace plan``: what a training needs of cores and Redis servers, or what an epoch of a store costs."""

from __future__ import annotations

import os
from typing import Annotated

from typer import Argument, Option

from millrace.cli import options

EXAMPLE = "millrace plan --gpus 64 --step-ms 200 --batch-mib 4 --make-ms 150"


def run(
    store: Annotated[
        str | None, Argument(help="Plan an epoch of this store, at a path or a URL, instead of workers.")
    ] = None,
    gpus: Annotated[int | None, Option(min=1, help="GPUs of the training.")] = None,
    step_ms: Annotated[float | None, Option(min=0.001, help="Milliseconds of one training step.")] = None,
    batch_mib: Annotated[float | None, Option(min=0.001, help="MiB that one GPU takes each step.")] = None,
    make_ms: Annotated[float | None, Option(min=0.001, help="Milliseconds that one core needs to make that.")] = None,
    depth: Annotated[int, Option(min=1, help="Batches ahead, as in Feed(depth=).")] = 4,
    gpus_per_host: Annotated[int, Option(min=1, help="GPUs of one machine.")] = 8,
    cores_per_host: Annotated[int, Option(min=0, help="Cores of such a machine that are free for data.")] = 0,
    tokens: Annotated[float | None, Option(min=1, help="Tokens of the whole training.")] = None,
    batch_tokens: Annotated[int | None, Option(min=1, help="Tokens that one GPU takes each step.")] = None,
    document_tokens: Annotated[int, Option(min=1, help="Tokens of a document, on average.")] = 1000,
    split: options.Split = None,
    length: options.Length = None,
    lookback: options.Lookback = None,
    horizon: options.Horizon = None,
    mb_per_s: Annotated[
        float | None, Option(min=0.001, help="MB a second from the store.", show_default="measured with a few files")
    ] = None,
    price_requests: Annotated[float | None, Option(min=0, help="Price of 1,000 requests.")] = None,
    price_gb: Annotated[float | None, Option(min=0, help="Price of a GB that leaves the store.")] = None,
    as_json: options.Json = False,
) -> None:
    """Plan workers for a training, or an epoch of a store.

    With a store it says bytes, requests, money and time of an epoch, and the order for --cache-size.
    For workers, measure --make-ms with feed.report() of a local feed: fill_s divided by batches.
    """
    from millrace.cli.plan_store import plan_epoch, show
    from millrace.cli.printing import plural, print_json, print_line, size
    from millrace.errors import ConfigError
    from millrace.queues.sizing import MANIFEST_BYTES, Corpus, Need
    from millrace.store.remote.cache import size_of

    if store is not None:
        view = options.build_view(store, split, length, lookback, horizon, None, 0)
        rate = None if mb_per_s is None else mb_per_s * 1e6
        cache = os.environ.get("MILLRACE_CACHE_SIZE")
        limit = None if cache is None else size_of(cache)
        epoch = plan_epoch(view, rate=rate, request_price=price_requests, gb_price=price_gb, cache_size=limit)
        if as_json:
            print_json(epoch.facts())
        else:
            show(epoch)
        return
    if gpus is None or step_ms is None or batch_mib is None or make_ms is None:
        raise ConfigError("give a store, or all of --gpus, --step-ms, --batch-mib and --make-ms")
    if (tokens is None) != (batch_tokens is None):
        raise ConfigError("--tokens and --batch-tokens go together; give both or neither")
    need = Need(gpus, step_ms, int(batch_mib * 2**20), make_ms, depth, gpus_per_host, cores_per_host)
    corpus = None if tokens is None or batch_tokens is None else Corpus(tokens, batch_tokens, document_tokens)
    if as_json:
        print_json({**need.facts(), "corpus": None if corpus is None else corpus.facts()})
        return
    print_line(f"{need.batches_per_s:,.0f} batches/s of {size(need.batch_bytes)} keep {need.cores:,.1f} cores busy")
    if not need.remote_cores:
        print_line(f"the {need.local_cores:,} cores beside the GPUs are enough: use processes=True, and no queue")
    else:
        print_line(f"{plural(need.remote_cores, 'core')} on other machines, as threads or processes of millrace worker")
        print_line(f"{plural(need.servers, 'Redis server')}; each rank names one, as in Feed(queue=)")
        print_line(f"network: {size(need.bytes_per_s)}/s from workers to Redis, and as much from there to the trainers")
        print_line(
            f"at a time at most {need.tickets:,} tickets ({need.ahead:,} a rank), {need.leases:,} of them leased, and "
            f"{need.keys:,} keys with {size(need.tickets * need.batch_bytes)} in Redis, however long it trains"
        )
    if corpus is not None:
        print_line(f"whole training: {corpus.tickets:,} tickets, made as they are needed")
        print_line(
            f"its store: {size(corpus.store_bytes)} in {plural(corpus.shards, 'shard')}; shards.bin "
            f"{size(corpus.shard_table_bytes)}, hashes.bin {size(corpus.hash_table_bytes)}, store.json at most "
            f"{size(MANIFEST_BYTES)} and the names of source files"
        )
