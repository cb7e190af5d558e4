"""The doctor reports its findings and fails only on real problems."""

import json
import os
import shutil
import sys

import pytest

from fabric.limits import GIB, MIB
from fabric.settings import parse_settings
from router.cli.doctor import doctor
from router.cli.doctor.doctor import sampling_checks


def test_doctor_succeeds_on_healthy_machine(run, tmp_path):
    status, out, err = run("doctor", "--data", str(tmp_path))

    assert (status, err) == (0, "")
    assert "fabric, node and router are macfabric" in out
    assert "No fabric is running" in out


def test_doctor_prints_json(run, tmp_path):
    printed = json.loads(run("doctor", "--json", "--data", str(tmp_path))[1])
    names = {check["name"] for check in printed["checks"]}

    assert printed["ok"] is True
    assert {"python", "names", "ray", "mlx", "memory", "disk", "RAY_ variables"} <= names
    assert {check["verdict"] for check in printed["checks"]} <= {"ok", "warning", "error"}


def test_failed_self_test_is_an_error(run, fabric):
    status, out, _ = run("doctor", "--url", fabric.url)

    assert status == 1
    assert "error    fabric: the cache self-test failed on node-b" in out
    assert "ethernet 192.168.1.10 10000 Mbit/s" in out


def test_unknown_template_format_is_a_warning():
    rows = [{"name": "node-a"}, {"name": "node-b", "template_warning": "calls are shown as text"}]
    (found,) = doctor.template_checks(rows)

    assert (found.name, found.verdict) == ("template on node-b", "warning")
    assert found.detail == "calls are shown as text"


def test_ray_variables_are_a_warning(monkeypatch):
    found = doctor._ray_variables({"RAY_ADDRESS": "x", "HOME": "/h"})

    assert found.verdict == "warning"
    assert "RAY_ADDRESS" in found.detail
    assert doctor._ray_variables({"HOME": "/h"}).verdict == "ok"


def test_foreign_package_name_is_an_error(monkeypatch):
    monkeypatch.setattr(doctor, "foreign_names", lambda: ["fabric (/elsewhere)"])

    assert doctor._names().verdict == "error"


def test_unwritable_disk_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)

    assert doctor._disk(tmp_path / "not" / "yet", GIB).verdict == "error"


def test_missing_package_is_an_error(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("surely-not-installed",))
    (found,) = doctor._packages()

    assert found.verdict == "error"


def test_long_data_folder_path_is_a_warning(tmp_path):
    assert doctor._sockets(tmp_path / ("long" * 30)).verdict == "warning"


def test_this_system_is_supported():
    assert doctor._system().verdict == "ok"
    assert ("macOS" in doctor._system().detail) == (sys.platform == "darwin")


def details(run, *argv):
    checks = json.loads(run("doctor", "--json", *argv)[1])["checks"]
    return {check["name"]: (check["verdict"], check["detail"]) for check in checks}


def test_memory_and_disk_checks_use_settings_of_config_option(run, tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text("metadata: {macfabric: {node: {hot_bytes: 100TiB, disk_bytes: 3 MiB}}}")
    found = details(run, "--data", str(tmp_path / "data"), "--config", str(config))

    assert found["memory"][0] == "error"
    assert "node.hot_bytes, 100.0 TiB" in found["memory"][1]
    assert found["disk"][0] == "ok"
    assert "agents may take 3.0 MiB more" in found["disk"][1]


def test_memory_and_disk_checks_use_stored_settings(run, tmp_path):
    (tmp_path / "config.yaml").write_text("metadata: {macfabric: {node: {hot_bytes: 77MiB}}}")

    assert "agents' caches 77.0 MiB" in details(run, "--data", str(tmp_path))["memory"][1]


def test_model_weights_that_exceed_memory_are_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "memory_bytes", lambda: 16 * GIB)
    settings = parse_settings({"model": str(tmp_path)})
    unknown = doctor._memory(settings)
    weights = tmp_path / "model.safetensors"
    weights.touch()
    os.truncate(weights, 5 * GIB)
    fits = doctor._memory(settings)
    os.truncate(weights, 13 * GIB)
    exceeds = doctor._memory(settings)

    assert unknown.verdict == fits.verdict == "ok"
    assert "not counted" in unknown.detail
    assert "weights 5.0 GiB" in fits.detail
    assert exceeds.verdict == "error"
    assert "weights take 13.0 GiB" in exceeds.detail


@pytest.mark.parametrize(
    ("ram_bytes", "limit", "gpu_bytes"),
    [
        (24 * GIB, "0\n", 16 * GIB),
        (64 * GIB, "0\n", 48 * GIB),
        (64 * GIB, "57344\n", 56 * GIB),
        (64 * GIB, "", 48 * GIB),
    ],
)
def test_gpu_memory_limit_of_mac_follows_ram_or_setting(monkeypatch, ram_bytes, limit, gpu_bytes):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(doctor, "memory_bytes", lambda: ram_bytes)
    monkeypatch.setattr(doctor, "run", lambda *command: limit)

    assert doctor._gpu_bytes() == gpu_bytes


def test_invalid_config_is_misuse(run, tmp_path):
    config = tmp_path / "cluster.yaml"
    config.write_text("metadata: {macfabric: {node: {hot_bytes: many}}}")
    status, out, err = run("doctor", "--config", str(config))

    assert (status, out) == (2, "")
    assert "macfabric.node.hot_bytes" in err


def test_nearly_full_drive_is_a_warning(monkeypatch, tmp_path):
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage(256 * GIB, 250 * GIB, 6 * GIB))
    found = doctor._disk(tmp_path, 500 * GIB)

    assert found.verdict == "warning"
    assert "agents may take 3.0 GiB more" in found.detail
    assert doctor._disk(tmp_path, 100 * MIB).verdict == "ok"


def sampled(node, **values):
    fields = {name: {"value": 1.0, "source": "built in"} for name in ("temperature", "top_p")}
    own = {name: {"value": value, "source": source} for name, (value, source) in values.items()}
    return {"name": node, "model": "qwen", "sampling": {**fields, **own}}


def test_sampling_check_reports_defaults_and_differences():
    own = {"temperature": (0.6, "generation_config.json"), "top_k": (20, "settings")}
    (alike,) = sampling_checks([sampled("node-a", **own), sampled("node-b", **own)])
    (differs,) = sampling_checks([sampled("node-a", **own), sampled("node-b")])
    (plain,) = sampling_checks([sampled("node-a")])

    assert alike.name == "sampling of qwen"
    assert alike.verdict == "ok"
    assert alike.detail == "temperature 0.6 (generation_config.json), top_k 20 (settings)"
    assert differs.verdict == "warning"
    assert "the nodes differ" in differs.detail
    assert plain.detail == "built in"
    assert list(sampling_checks([{"name": "node-a", "state": "expired"}])) == []
