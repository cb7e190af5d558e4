from fabric.net.links import Address, LinkKind, nominal_bytes_per_s

GIGABIT = 125_000_000


def test_link_without_nominal_speed_is_assumed_gigabit():
    assert nominal_bytes_per_s(Address("h", 1, LinkKind.ETHERNET)) == GIGABIT
    assert nominal_bytes_per_s(Address("h", 1, LinkKind.ETHERNET, 10_000)) == 10 * GIGABIT
    for kind in LinkKind:
        assert nominal_bytes_per_s(Address("h", 1, kind)) > 0
