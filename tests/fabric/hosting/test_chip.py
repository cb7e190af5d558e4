"""The name of the processor is read from the system."""

import sys

import pytest

from fabric.hosting.chip import CPUINFO, chip_name

EPYC = "processor\t: 0\nmodel\t\t: 17\nmodel name\t: AMD EPYC\n\nmodel name\t: other\n"


@pytest.mark.parametrize(
    ("text", "name"), [(EPYC, "AMD EPYC"), ("processor\t: 0\n", None), ("model name\t:\n", None)]
)
def test_name_is_that_of_the_first_processor(tmp_path, text, name):
    path = tmp_path / "cpuinfo"
    path.write_text(text)

    assert chip_name("linux", path) == name


def test_system_without_the_file_has_no_name(tmp_path):
    assert chip_name("linux", tmp_path / "none") is None


@pytest.mark.skipif(sys.platform == "darwin", reason="reads a file of Linux")
def test_this_machine_is_named_as_its_file_names_it():
    name = chip_name()

    assert name is None or name in CPUINFO.read_text()


@pytest.mark.mac
@pytest.mark.skipif(sys.platform != "darwin", reason="needs macOS: sysctlbyname")
def test_mac_has_a_name():
    assert chip_name()
