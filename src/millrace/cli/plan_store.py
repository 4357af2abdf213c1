"""``millrace plan STORE``: what an epoch of a store costs in bytes, requests, money and time, before it runs."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from millrace.cli.printing import plural, print_line, size
from millrace.view.view import View

TABLES = 3  # requests at open: the manifest and two tables
PROBES = 8  # files that are fetched to measure the rate


@dataclass(frozen=True)
class EpochPlan:
    """An epoch of a view. ``rate`` is bytes a second from where the store lies; None on this machine, or not known."""

    path: str
    samples: int
    bytes: int  # of the columns that the view reads
    files: int
    largest_shard: int
    rate: float | None
    request_price: float | None  # per 1,000
    gb_price: float | None
    order: str | None = None  # for a cache that the store does not fit in

    @property
    def requests(self) -> int:
        return self.files + TABLES

    @property
    def money(self) -> float | None:
        if self.request_price is None and self.gb_price is None:
            return None
        return self.requests / 1000 * (self.request_price or 0.0) + self.bytes / 1e9 * (self.gb_price or 0.0)

    @property
    def samples_per_s(self) -> float | None:
        return None if not self.rate else self.samples / (self.bytes / self.rate)

    def facts(self) -> dict[str, Any]:
        more = {"requests": self.requests, "money": self.money, "samples_per_s": self.samples_per_s}
        return {**asdict(self), **more, "seconds": None if not self.rate else self.bytes / self.rate}


def plan_epoch(
    view: View, *, rate: float | None, request_price: float | None, gb_price: float | None, cache_size: int | None
) -> EpochPlan:
    """The plan of an epoch of ``view`` in a cache of this size; a rate that is not given is measured."""
    from millrace.order.orders import BlockShuffled
    from millrace.view.compose import leaves

    sizes, path = view.shard_bytes(), view.stores[0].path
    files = sum(len({field.column for field in leaf.fields}) * len(leaf.shard_bytes()) for leaf in leaves(view))
    if rate is None and "://" in path:
        rate = measure(view)
    order = None
    if cache_size is not None and cache_size < int(sizes.sum()):
        found = BlockShuffled.for_cache(view, cache_size)
        order = f"mr.BlockShuffled({found.n}, block={found.block}, window={found.window}, seed=0)"
    largest = int(sizes.max(initial=0))
    return EpochPlan(path, len(view), int(sizes.sum()), files, largest, rate, request_price, gb_price, order)


def measure(view: View) -> float | None:
    """Bytes a second of a few files, which an epoch needs anyway: they stay in the cache. None where all are there."""
    column = view.store.columns[view.fields[0].column]
    shards, files = getattr(column, "codes", getattr(column, "raw", column)).files()
    shards.choose(None)  # an epoch reads whole files
    chosen = [file for file in files if not shards.is_at_hand(*file)][:PROBES]
    while not shards.will_need(chosen):  # the cache does not hold as many
        chosen.pop()
    if not chosen:
        return None
    began = time.perf_counter()
    shards.expect(chosen)
    for file in chosen:
        shards.array(*file)
    fetched: int = sum(shards.num_bytes(*file) for file in chosen)
    return fetched / (time.perf_counter() - began)


def show(plan: EpochPlan) -> None:
    print_line(
        f"an epoch: {plural(plan.samples, 'sample')}, {size(plan.bytes)} in {plural(plan.files, 'file')}, the largest shard "
        f"{size(plan.largest_shard)}"
    )
    if "://" in plan.path:
        later = "none if the cache holds it" if plan.order is None else "as many, since the cache does not hold it"
        print_line(f"first epoch: {plural(plan.requests, 'request')}, {size(plan.bytes)}; later ones {later}")
        if plan.money is not None:
            money = f"{plan.money:,.2f}" if plan.money >= 1 else f"{plan.money:.2g}"
            print_line(f"money: {money} at the prices given")
        if plan.rate and plan.samples_per_s:
            print_line(
                f"expected: {size(plan.rate)}/s, {plan.samples_per_s:,.0f} samples/s, "
                f"{plan.bytes / plan.rate:,.1f} s an epoch, if the loop is not slower"
            )
    if plan.order is not None:
        print_line("the cache is smaller than the store; an order that fits:")
        print_line(f"order={plan.order}")
