"""Memory figures of a machine."""

import sys

import pytest

from node import machine
from node.machine import (
    Pressure,
    memory_pressure,
    pressure_of_level,
    pressure_of_stalls,
    ram_bytes,
    swap_bytes,
)


@pytest.mark.parametrize(
    ("level", "pressure"),
    [
        (None, Pressure.NORMAL),
        (0, Pressure.NORMAL),
        (1, Pressure.NORMAL),
        (2, Pressure.WARNING),
        (3, Pressure.WARNING),
        (4, Pressure.CRITICAL),
    ],
)
def test_macos_pressure_levels_are_mapped(level, pressure):
    assert pressure_of_level(level) is pressure


@pytest.mark.parametrize(
    ("some", "full", "pressure"),
    [
        (0.0, 0.0, Pressure.NORMAL),
        (9.99, 0.0, Pressure.NORMAL),
        (10.0, 9.0, Pressure.WARNING),
        (95.5, 40.12, Pressure.CRITICAL),
    ],
)
def test_linux_stalls_are_mapped_to_pressure(some, full, pressure):
    text = (
        f"some avg10={some:.2f} avg60=99.00 avg300=99.00 total=123\n"
        f"full avg10={full:.2f} avg60=99.00 avg300=99.00 total=123\n"
    )
    assert pressure_of_stalls(text) is pressure


@pytest.mark.parametrize("text", ["", "nonsense", "some avg10=", "some avg60=99.0"])
def test_unreadable_stalls_mean_normal_pressure(text):
    assert pressure_of_stalls(text) is Pressure.NORMAL


@pytest.mark.skipif(sys.platform == "darwin", reason="reads a file of Linux")
def test_system_without_stall_file_has_normal_pressure(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "STALLS", tmp_path / "none")
    assert memory_pressure() is Pressure.NORMAL

    (tmp_path / "none").write_text("some avg10=50.00 avg60=0.00 avg300=0.00 total=1\n")
    assert memory_pressure() is Pressure.WARNING


@pytest.mark.mac
@pytest.mark.skipif(sys.platform != "darwin", reason="needs macOS: sysctlbyname")
def test_macos_reports_a_pressure_level():
    assert machine._read_level() in {1, 2, 4}


def test_machine_without_thermal_state_counts_as_nominal():
    assert machine.thermal_state("linux") == "nominal"


@pytest.mark.parametrize(
    ("number", "state"),
    [
        (-1, "nominal"),
        (0, "nominal"),
        (1, "fair"),
        (2, "serious"),
        (3, "critical"),
        (9, "critical"),
    ],
)
def test_macos_thermal_states_are_mapped(monkeypatch, number, state):
    monkeypatch.setattr(machine, "_read_thermal_state", lambda: number)

    assert machine.thermal_state("darwin") == state


@pytest.mark.mac
@pytest.mark.skipif(sys.platform != "darwin", reason="needs macOS: NSProcessInfo, QoS classes")
def test_macos_reports_thermal_state_and_accepts_qos_class():
    assert machine.thermal_state() in machine.THERMAL_STATES
    assert machine.ask_for_fast_cores()


def test_other_systems_have_no_qos_class():
    assert not machine.ask_for_fast_cores("linux")


def test_container_limit_caps_ram(tmp_path):
    installed_bytes = ram_bytes(tmp_path / "none")
    limit = tmp_path / "memory.max"

    limit.write_text("max\n")
    assert ram_bytes(limit) == installed_bytes > 1 << 28
    limit.write_text("1073741824\n")
    assert ram_bytes(limit) == min(installed_bytes, 1 << 30)


def test_swap_in_use_is_read(tmp_path):
    meminfo = tmp_path / "meminfo"

    meminfo.write_text(
        "MemTotal: 9 kB\nSwapCached: 5 kB\nSwapTotal:   2048 kB\nSwapFree:  1024 kB\n"
    )
    assert swap_bytes("linux", meminfo) == 1 << 20
    meminfo.write_text("MemTotal: 9 kB\n")
    assert swap_bytes("linux", meminfo) is None
    assert swap_bytes("linux", tmp_path / "none") is None


@pytest.mark.mac
@pytest.mark.skipif(sys.platform != "darwin", reason="needs macOS: sysctlbyname")
def test_macos_reports_swap():
    assert swap_bytes() >= 0
