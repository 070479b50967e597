"""How much travels at once, and how: from figures of links."""

import pytest

from samestep.plan.links import (
    CPU_LINKS,
    GPU_LINKS,
    LEAST_ELEMENTS,
    MOST_ELEMENTS,
    Fabric,
    Link,
    bucket_elements,
)

LARGE = 7_000_000_000  # elements, in 16 bit


def gpus(ranks, per_host=8):
    return Fabric(*GPU_LINKS, ranks, min(ranks, per_host))


def test_rings_share_what_leaves_a_host():
    inside, between = GPU_LINKS
    assert gpus(8).ring() == inside
    assert gpus(64).ring().bandwidth == min(8 * between.bandwidth, inside.bandwidth)
    assert gpus(64, per_host=1).ring() == between
    slow = Fabric(Link(1e-5, 1e9), Link(1e-5, 4e8), 16, 8)
    assert slow.ring().bandwidth == 1e9  # a card cannot pass on more


def test_more_ranks_have_larger_buckets():
    sizes = [bucket_elements(560_000_000, 1_120_000_000, gpus(n)) for n in (2, 8, 64, 512, 4096)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 5
    assert all(LEAST_ELEMENTS <= size <= MOST_ELEMENTS for size in sizes)
    # n latencies and the last of n parts: neither half nor twice as many are sooner.
    link = gpus(64).ring()

    def seconds(count):
        return count * link.seconds(64, 0) + 1_120_000_000 / count / link.bandwidth

    count = 560_000_000 / sizes[2]
    assert seconds(count) < min(seconds(count / 2), seconds(count * 2))


def test_small_models_and_large_ones_keep_to_the_limits():
    assert bucket_elements(1000, 4000, gpus(64)) == LEAST_ELEMENTS
    assert bucket_elements(LARGE, 2 * LARGE, gpus(4096)) == MOST_ELEMENTS
    assert bucket_elements(0, 0, Fabric(*CPU_LINKS, 2, 2)) == LEAST_ELEMENTS
    nothing = Fabric(Link(0.0, 1e30), Link(0.0, 1e30), 4, 4)
    assert bucket_elements(LARGE, 2 * LARGE, nothing) == MOST_ELEMENTS


def test_what_is_there_at_once_travels_as_one():
    elements = 200_000_000
    few = bucket_elements(elements, 2 * elements, gpus(8), most_buckets=4)
    assert few == elements // 4
    assert few > bucket_elements(elements, 2 * elements, gpus(8))


@pytest.mark.parametrize(
    ("ranks", "per_host", "carried", "exchanged", "pays"),
    [
        (8, 8, 1e8, True, False),  # one host
        (8, 1, 1e8, True, False),  # one rank on each
        (64, 8, 1e8, True, True),  # each rank sends to each other one, over one card
        (64, 8, 1e8, False, False),  # rings use all cards
        (4096, 8, 1e8, False, True),  # and take long to get going
    ],
)
def test_when_two_levels_pay(ranks, per_host, carried, exchanged, pays):
    assert gpus(ranks, per_host).pays_in_two(carried, exchanged=exchanged) is pays


def test_legs_beside_each_other_make_two_levels_pay_sooner():
    """One bucket takes both legs; of many in a row only the longer ones count."""
    fabric = gpus(512)
    one, many = fabric.seconds_in_two(5e8), fabric.seconds_in_two(5e8, in_a_row=1000)
    inside, across = fabric.inside.seconds(8, 5e8), fabric.between.seconds(64, 5e8 / 8)
    assert one == inside + across
    assert many == pytest.approx(max(inside, across), rel=1e-3)
    assert not fabric.pays_in_two(5e8, exchanged=False)
    assert fabric.pays_in_two(5e8, exchanged=False, in_a_row=10)


def test_a_block_that_is_most_of_a_bucket_crosses_over_one_card():
    assert gpus(4096).pays_in_two(5e8, exchanged=False)
    assert not gpus(4096).pays_in_two(5e8, exchanged=False, block=4e8)


def test_hosts_of_cpus_go_in_two_levels():
    assert Fabric(*CPU_LINKS, 16, 8).pays_in_two(1e8, exchanged=True)
    assert not Fabric(*CPU_LINKS, 16, 16).pays_in_two(1e8, exchanged=True)
