"""Aliases in place of names, and secrets that are removed from texts."""

import pytest

from router.cli.support.aliases import AGENT, NODE, TENANT, Aliases
from router.cli.support.log_tails import read_log_tail
from router.cli.support.secrets import REMOVED, Secrets

KEY = b"k" * 32


@pytest.fixture
def aliases():
    learnt = Aliases(KEY)
    for kind, name in ((AGENT, "mira:7@home"), (TENANT, "acme.corp"), (NODE, "studio-2")):
        learnt.learn(kind, name)
    return learnt


@pytest.mark.parametrize(
    "text",
    [
        "agent mira:7@home moved.",
        "acme.corp/mira:7@home",
        "node.studio-2.jsonl: lost (studio-2, https://studio-2:8000/v1)",
        'tenant="acme.corp"',
        "mira:7@home.",
        "agent=mira:7@home, ray-studio-2.log",
        "(mira:7@home) [acme.corp]",
    ],
)
def test_learnt_names_are_replaced_in_any_text(aliases, text):
    shown = aliases.replace_in_text(text)

    for name in ("mira", "acme", "studio"):
        assert name not in shown
    assert "-" in shown


def test_aliases_are_stable_under_one_key_only(aliases):
    other = Aliases(b"x" * 32)

    assert aliases.alias(AGENT, "mira") == Aliases(KEY).alias(AGENT, "mira")
    assert aliases.alias(AGENT, "mira") != other.alias(AGENT, "mira")
    assert aliases.alias(AGENT, "mira") != aliases.alias(AGENT, "ivan")


def test_addresses_of_networks_are_replaced_and_those_of_every_machine_kept(aliases):
    text = "10.1.2.3:80 fd00::12 aa:bb:cc:dd:ee:ff 127.0.0.1 ::1 0.0.0.0 169.254.9.9 at 04:47:37"
    shown = aliases.replace_in_text(text)

    for name in ("10.1.2.3", "fd00::12", "aa:bb:cc"):
        assert name not in shown
    assert shown.count("host-") == 3
    assert shown.endswith("127.0.0.1 ::1 0.0.0.0 169.254.9.9 at 04:47:37")


def test_names_in_answers_are_learnt_by_their_fields(aliases):
    rows = [
        {"id": "quinn", "tenant": "umbrella", "bytes": {"hot": 1}, "copies": [{"node": "mini"}]}
    ]
    aliases.learn_from(rows, {"id": AGENT, "tenant": TENANT, "node": NODE})
    shown = str(aliases.replace(rows))

    for name in ("quinn", "umbrella", "mini"):
        assert name not in shown
    assert "'hot': 1" in shown


def test_kept_names_change_nothing():
    kept = Aliases(KEY, keeps_names=True)
    kept.learn(AGENT, "mira")
    assert kept.replace({"mira": "mira at 10.1.2.3"}) == {"mira": "mira at 10.1.2.3"}


@pytest.mark.parametrize(
    "secret",
    [
        "sk-ant-REDACTED",
        "hf_abcdefghijklmnopqrstuv",
        "ghp_abcdefghijklmnopqrstuvwxyz0123",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        "0123456789abcdef" * 4,
        "sha256:" + "0f" * 32,
        "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMGByqGSM49\n-----END PRIVATE KEY-----",
    ],
)
def test_texts_that_look_like_secrets_are_removed(secret):
    shown = Secrets().scrub(f"before {secret} after")
    assert shown == f"before {REMOVED} after"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("authorization: Bearer hunter2-hunter2", "hunter2"),
        ('{"api_key": "hunter2-hunter2"}', "hunter2"),
        ("MACFABRIC_API_KEY=hunter2-hunter2", "hunter2"),
        ("https://me:hunter2@host/v1", "hunter2"),
    ],
)
def test_named_secrets_are_removed_and_their_names_kept(text, secret):
    shown = Secrets().scrub(text)
    assert secret not in shown
    assert REMOVED in shown


def test_known_secret_is_removed_in_every_spelling():
    secret = "correct horse / battery"
    known = Secrets()
    known.add(secret)
    spelled = f"{secret} correct%20horse%20%2F%20battery Y29ycmVjdCBob3JzZSAvIGJhdHRlcnk="

    assert known.is_in(spelled.encode())
    shown = known.scrub(spelled)
    assert not known.is_in(shown.encode())
    assert "horse" not in shown
    assert "Y29ycmVj" not in shown


def test_log_of_processes_keeps_known_lines_only(tmp_path):
    log = tmp_path / "nodes.log"
    log.write_text(
        "2026-11-29 04:47:43,414 INFO Ray connected\n"
        "Traceback (most recent call last):\n"
        '  File "/x/node/turn.py", line 3, in serve\n'
        "    raise ValueError(prompt)\n"
        "ValueError: the vault code is otter\n"
        "and quartz\n"
    )
    tail = read_log_tail(log, 10_000)

    assert tail.text.splitlines() == [
        "2026-11-29 04:47:43,414 INFO Ray connected",
        "Traceback (most recent call last):",
        '  File "/x/node/turn.py", line 3, in serve',
        "ValueError",
    ]
    assert tail.lines_left_out == 2


def test_log_of_json_lines_keeps_known_fields_of_its_last_bytes(tmp_path):
    log = tmp_path / "router.jsonl"
    lines = [f'{{"at_s":{n},"message":"m{n}","prompt":"otter"}}' for n in range(100)]
    log.write_text("\n".join([*lines, "otter", '{"cut']) + "\n")
    tail = read_log_tail(log, 500)

    assert "otter" not in tail.text
    assert tail.text.endswith('{"at_s":99,"message":"m99"}\n')
    assert tail.text.startswith('{"at_s":')
    assert len(tail.text) < 500
    assert tail.bytes_before > 0
    assert tail.lines_left_out == 2
