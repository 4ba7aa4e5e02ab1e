"""The ways of minidist bench compress, and the bandwidths of its links."""

import argparse

import pytest

from minidist.bench.compress.links import ALL, bandwidth_text, bandwidths
from minidist.bench.compress.ways import split_ways, way_of
from minidist.errors import ConfigError


def test_ways_are_split_and_read():
    words = split_ways(
        "none,top-k:density=0.1,momentum=0.5,sign,local-steps:every=10,fragments=5,compress=4bit"
    )
    assert words == [
        "none",
        "top-k:density=0.1,momentum=0.5",
        "sign",
        "local-steps:every=10,fragments=5,compress=4bit",
    ]
    plan = way_of(words[3], 100).plan(4)
    assert (plan.local_steps, plan.fragments, plan.outer, plan.outer_compress) == (
        10,
        5,
        "nesterov",
        "4bit",
    )
    assert way_of("local-steps:rate=2", 100).rate == 2.0 and way_of(words[3], 100).rate == 1.0
    assert way_of("local-steps:rate=2", 100).plan(4).outer == "nesterov"
    assert way_of(words[3], 100).period == 10 and way_of(words[1], 100).plan(2).compress == words[1]


def test_one_bit_adam_warms_up_for_a_fifth():
    way = way_of("1-bit", 200)
    assert (
        way.warmup == 40 and way.text == "1-bit:warmup=40" and way.timed().text == "1-bit:warmup=1"
    )
    assert way.seconds(100, 1.0, 10.0) == 40 * 10.0 + 60 * 1.0
    assert way.seconds(30, 1.0, 10.0) == 300.0  # the target is reached in the warm-up
    assert way_of("1-bit:warmup=7", 200).warmup == 7
    assert way_of("sign", 200).seconds(100, 1.0, 10.0) == 100.0


@pytest.mark.parametrize(
    "text",
    [
        "local-steps:each=3",
        "local-steps:rate=0",
        "local-steps:every=many",
        "local-steps:every=25,fragments=4",
        "top-k:density=2",
        "1-bit:warmup=0",
    ],
)
def test_what_is_no_way_is_refused(text):
    with pytest.raises(ConfigError):
        way_of(text, 100)


def test_unknown_names_and_bandwidths_are_refused():
    for parse, text in (
        (split_ways, "none,gzip"),
        (bandwidths, "10MB"),
        (bandwidths, "0Mbit"),
        (bandwidths, ""),
    ):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)


def test_bandwidths():
    assert bandwidths("1Gbit,10Mbit") == [1.25e6, 1.25e8]
    assert [bandwidth_text(speed) for speed in bandwidths("64Kbit,2.5Mbit,10Gbit")] == [
        "64 Kbit/s",
        "2.5 Mbit/s",
        "10 Gbit/s",
    ]
    assert len(bandwidths(ALL)) == 8
