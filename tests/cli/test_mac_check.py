"""`make mac-check` runs every step, reads its output, and prints a table."""

import json
import sys
from dataclasses import replace

import pytest

from benchmarks import mac_check
from benchmarks.mac_check import Result, Step


def program(text: str, judge=mac_check.judge_tests, name="one") -> Step:
    return Step(name, "something", (sys.executable, "-c", text), judge)


def test_failed_step_does_not_stop_others(monkeypatch, capsys):
    steps = (
        program("print('FAILED tests/a.py::test_b - boom'); print('1 failed'); exit(1)"),
        program("import os; os.kill(os.getpid(), 9)", name="two"),
        program("print('3 passed in 1 s')", name="three"),
    )
    monkeypatch.setattr(mac_check, "STEPS", steps)

    assert mac_check.main(["--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["steps"]
    assert [row["verdict"] for row in rows] == ["failed", "failed", "ok"]
    assert rows[0]["detail"] == "1 failed; tests/a.py::test_b"
    assert rows[2]["detail"] == "3 passed in 1 s"


def test_step_is_killed_after_timeout(monkeypatch):
    monkeypatch.setattr(mac_check, "STEP_TIMEOUT_S", 0.5)
    found = mac_check.run_step(program("import time; time.sleep(60)"), quick=False)

    assert (found.verdict, found.detail) == ("failed", "did not finish within 0.5 s")


@pytest.mark.parametrize(
    ("met", "verdict"), [(True, "ok"), (None, "ok"), (False, "missed")], ids=str
)
def test_verdict_on_a_benchmark_follows_its_limits(met, verdict):
    limit = {"statement": "kept", "figure": 0.5, "bound": 1.0, "met": met}

    assert mac_check.judge_bench(0, json.dumps({"limits": [limit], "met": met})) == (
        verdict,
        "kept 0.5 (limit 1)",
    )


def test_missed_limits_of_a_benchmark_are_listed_first():
    kept = {"statement": "kept", "figure": 0.5, "bound": 1.0, "met": True}
    missed = {"statement": "missed", "figure": None, "bound": 1.0, "met": False}
    report = {"limits": [kept, missed], "met": False}

    assert mac_check.judge_bench(1, json.dumps(report))[1] == (
        "missed - (limit 1); kept 0.5 (limit 1)"
    )


@pytest.mark.parametrize("judge", [mac_check.judge_bench, mac_check.judge_demo])
def test_program_without_json_fails_with_its_last_line(judge):
    assert judge(1, "some\nFatalError: no such model\n") == ("failed", "FatalError: no such model")


def test_doctor_warning_does_not_fail_the_step():
    checks = [{"name": "sleep", "verdict": "warning", "detail": "it sleeps"}]
    printed = json.dumps({"ok": True, "checks": checks})

    assert mac_check.judge_doctor(0, printed) == ("ok", "warning: sleep")
    assert mac_check.judge_doctor(1, printed)[0] == "failed"
    assert mac_check.judge_doctor(0, "{}")[0] == "failed"


def test_table_has_a_row_per_step_and_no_paths():
    one = Result("demo", "that it runs", "ok", "a | b", 1.0, 0.0)
    text = mac_check.table(mac_check.machine(), [one, replace(one, name="two")])

    assert text.splitlines()[-2:] == [
        "| demo | that it runs | ok | a / b | 1.0 | 0.0 |",
        "| two | that it runs | ok | a / b | 1.0 | 0.0 |",
    ]
    assert str(mac_check.ROOT) not in text


def test_swap_usage_of_macos_is_parsed(monkeypatch):
    line = "total = 2048.00M  used = 1028.25M  free = 1019.75M  (encrypted)"
    monkeypatch.setattr(mac_check, "run", lambda *_: line)

    assert mac_check.used_swap_mib() == 1028.25


@pytest.mark.slow
def test_real_steps_succeed(capsys):
    names = ["doctor", "tests", "device errors", "bench append"]
    status = mac_check.main(["--quick", *(part for name in names for part in ("--only", name))])
    table = capsys.readouterr().out

    assert status == 0, table
    assert table.count("| ok |") == len(names)
