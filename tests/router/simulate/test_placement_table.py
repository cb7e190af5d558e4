"""Tables of the committed placement study, from what `macfabric simulate --json` prints."""

import hashlib
import json
from dataclasses import replace

import pytest

from benchmarks.placement_table import main
from router.simulate.catalog import WORKLOADS
from router.simulate.run import Conditions
from router.simulate.study import Study, plan_workload
from tests.router.simulate.small import THREE

OTHERS = ("owner-always", "sticky", "dynamo-1", "dynamo-4", "dynamo-16", "dynamo-64", "dynamo-256")


def write_study(folder, link_mbit, policies, seed):
    """Run one small study on links of a rate; return the file with its JSON."""
    nodes = tuple(replace(node, link_mbit=link_mbit) for node in THREE.nodes)
    fleet = replace(THREE, nodes=nodes)
    study = Study(fleet, policies, (seed,), Conditions())
    cells = [study.cell(plan_workload(WORKLOADS["W6"], fleet, load, 6)) for load in (0.5, 0.9)]
    command = f"macfabric simulate W6 --first-seed {seed} --link-mbit {link_mbit}"
    file = folder / f"{link_mbit}-{seed}.json"
    file.write_text(json.dumps(study.as_json(cells) | {"command": command}))
    return file


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies")
    slow = [write_study(folder, 1_000, ("seconds", *OTHERS), seed) for seed in (1, 2)]
    return [*slow, *(write_study(folder, 10_000, ("seconds",), seed) for seed in (1, 2))]


def means(files, policy):
    """Return a policy's mean by load and seed."""
    runs = {}
    for file in files:
        for cell in json.loads(file.read_text())["cells"]:
            for run in cell["policies"][policy]["runs"]:
                runs[cell["load"], run["seed"]] = run["ttft_mean_s"]
    return runs


def rows(output, title):
    """Return the rows of a table by their first cells."""
    lines = output[output.index(title) :].split("\n\n")[1 if title.startswith("##") else 0]
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in lines.splitlines()]
    return cells[0], {tuple(row[:2]): row for row in cells[2:]}


def test_files_are_joined_to_one_table_per_link(files, capsys):
    main([str(file) for file in files])
    output = capsys.readouterr().out

    ours, theirs = means(files[:2], "seconds"), means(files[:2], "sticky")
    columns, slow = rows(output, "## Links of 1 Gbit/s")
    assert columns[6:] == ["owner-always", "sticky", "dynamo-tuned"]
    row = slow["W6", "90%"]
    assert row[2] == f"{(ours[0.9, 1] + ours[0.9, 2]) / 2:.2f}"
    ratio = (theirs[0.9, 1] / ours[0.9, 1] * theirs[0.9, 2] / ours[0.9, 2]) ** 0.5
    assert row[7].startswith(f"{ratio:.2f} (")
    _, fast = rows(output, "## Links of 10 Gbit/s")
    faster = means(files[2:], "seconds")
    ratio = (theirs[0.9, 1] / faster[0.9, 1] * theirs[0.9, 2] / faster[0.9, 2]) ** 0.5
    assert fast["W6", "90%"][7].startswith(f"{ratio:.2f} (")


def test_best_scale_of_dynamo_counts_by_load(files, capsys):
    main([str(file) for file in files])
    _, slow = rows(capsys.readouterr().out, "## Links of 1 Gbit/s")

    ours = means(files[:2], "seconds")
    for load, name in ((0.5, "50%"), (0.9, "90%")):
        scales = [means(files[:2], policy) for policy in OTHERS[2:]]
        products = [scale[load, 1] * scale[load, 2] for scale in scales]
        ratio = (min(products) / ours[load, 1] / ours[load, 2]) ** 0.5
        assert slow["W6", name][8].startswith(f"{ratio:.2f} (")


def test_gains_are_means_over_loads(files, capsys):
    main([str(file) for file in files])
    _, gains = rows(capsys.readouterr().out, "| link |")

    before, ours = means(files[:2], "owner-always"), means(files[:2], "seconds")
    product = 1.0
    for key, mean_s in before.items():
        product *= mean_s / ours[key]
    (row,) = (row for key, row in gains.items() if key[0] == "1 Gbit/s")
    assert row[1].startswith(f"{product ** (1 / len(before)):.2f}, ")


def test_commands_and_hashes_of_files_are_printed(files, capsys):
    main([str(file) for file in files])
    output = capsys.readouterr().out

    for file in files:
        command = json.loads(file.read_text())["command"]
        assert f"{command} {hashlib.sha256(file.read_bytes()).hexdigest()}" in output
