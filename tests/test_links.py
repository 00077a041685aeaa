"""Links of groups of chips, worked out by hand; `tests/aot/test_targets.py` compares places with the compiler's."""

import pytest

from detspec.errors import InputError
from detspec.roofline import Links, coordinates, links_of, num_devices
from detspec.targets import GB, target


def test_chips_are_counted_host_by_host():
    assert coordinates(target("v6e:2x4")) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]
    assert coordinates(target("v5e:4x4"))[4:9] == [(2, 0), (3, 0), (2, 1), (3, 1), (0, 2)]
    assert coordinates(target("v5p:2x2x2"))[3:6] == [(1, 1, 0), (0, 0, 1), (1, 0, 1)]
    assert coordinates(target("tpu7x:2x2x1"))[:3] == [(0, 0, 0), (0, 0, 0), (1, 0, 0)]


@pytest.mark.parametrize(
    ("name", "chips", "num", "received", "cut", "hops"),
    [
        ("v6e:2x2", 2, 1, 90, 90, 1),
        ("v6e:2x2", 4, 2, 180, 180, 2),
        ("v6e:2x4", 8, 2, 180, 180, 4),
        ("v5e:4x4", 8, 2, 90, 90, 4),
        ("v5p:2x2x1", 4, 2, 180, 180, 2),
        ("v5p:2x2x2", 8, 3, 270, 360, 3),
        ("v5p:2x2x4", 16, 4, 360, 720, 4),  # 1 + 1 + a ring of 4
        ("v5e:16x16", 256, 4, 180, 1440, 16),  # two rings of 16
        ("tpu7x:2x2x1", 8, 2, 100, 200, 2),  # two devices share the links of a chip
        ("tpu7x:2x2x1", 2, 1, 50, 100, 1),
    ],
)
def test_corner_of_tpus_has_the_links_of_its_axes(name: str, chips: int, num: int, received: int, cut: int, hops: int):
    assert links_of(target(name), chips) == Links(num, received * GB, cut * GB, hops, 1e-6, 0.0)


def test_gpus_receive_by_a_switch_in_a_ring():
    assert links_of(target("h200"), 8) == Links(1, 450 * GB, 4 * 450 * GB, 7, 0.6e-6, 6.6e-6)


def test_collective_takes_its_start_its_hops_and_its_bytes():
    """2 rounds of 4 hops of 1 us and 5 us to start, 180 kB at 90 GB/s; 720 kB across the middle, at 180 GB/s, take longer."""
    links = Links(1, 90 * GB, 180 * GB, 4, 1e-6, 5e-6)
    assert links.seconds(180_000, rounds=2) == pytest.approx(15e-6, rel=1e-12)
    assert links.seconds(180_000, cut_bytes=720_000) == pytest.approx(13e-6, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "chips", "there_are"), [("v6e:2x2", 8, 4), ("h200", 16, 8), ("tpu7x:2x2x1", 16, 8), ("l4", 2, 1)]
)
def test_more_chips_than_there_are_are_refused(name: str, chips: int, there_are: int):
    assert num_devices(target(name)) == there_are
    with pytest.raises(InputError, match=f"{chips} chips were asked for, but {name} has {there_are} device"):
        links_of(target(name), chips)
