"""What a seed means never changes: orders, keys and the feed's random numbers are those of version 1."""

import json
import runpy
import struct
from pathlib import Path
from statistics import NormalDist

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("part", ["shuffled", "block_shuffled", "round_keys", "rng", "mixture", "packed", "budget"])
def test_numbers_are_those_of_the_first_version(part):
    golden = json.loads((HERE / "orders.json").read_text())[part]
    made = runpy.run_path(str(HERE / "make_orders.py"))["vectors"]()[part]
    for found, expected in zip(made, golden, strict=True):
        assert found == expected


def test_the_golden_cases_cover_small_large_and_repeated_epochs():
    cases = json.loads((HERE / "orders.json").read_text())["shuffled"]
    wanted = {(n, seed, epoch) for n in (1, 5, 1023, 1024, 10**6, 10**12) for seed in (0, 7) for epoch in (0, 1)}
    assert wanted | {(1 << 62, 0, 0), ((1 << 63) - 1, 7, 0)} <= {(c["n"], c["seed"], c["epoch"]) for c in cases}


# The feed's random numbers once more, in plain integers, as docs/architecture.md writes them down.


def mix64(value):
    value %= 1 << 64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    value = (value ^ value >> 27) * 0x94D049BB133111EB % (1 << 64)
    return value ^ value >> 31


def bits(seed, position, call, element):
    golden = 0x9E3779B97F4A7C15
    key = mix64(mix64(seed ^ 0x72616E646F6D) ^ mix64(call))
    return mix64(mix64(mix64(position + golden) ^ key) + (element + 1) * golden)


def floats(words):
    return [struct.unpack(">d", bytes.fromhex(word))[0] for word in words]


def test_random_numbers_are_those_of_the_twin():
    for case in json.loads((HERE / "orders.json").read_text())["rng"]:
        seed, positions = case["seed"], case["positions"]
        draws = {call: [bits(seed, p, call, j) for p in positions for j in range(4)] for call in range(1, 6)}
        two = [k for k in range(4 * len(positions)) if k % 4 < 2]
        assert floats(case["uniform"]) == [(draws[1][k] >> 11) * 2.0**-53 for k in two]
        assert [number for pair in case["integers"] for number in pair] == [draws[2][k] % 103 - 3 for k in two]
        assert case["wide"] == [draws[3][k] % (1 << 62) - (1 << 61) for k in range(0, len(draws[3]), 4)]
        uniform = [((word >> 12) + 0.5) * 2.0**-52 for word in draws[4]]
        assert floats(case["normal"]) == pytest.approx([NormalDist().inv_cdf(u) for u in uniform], rel=1e-14)
        assert floats(case["again"]) == [(draws[5][k] >> 11) * 2.0**-53 for k in range(0, len(draws[5]), 4)]
