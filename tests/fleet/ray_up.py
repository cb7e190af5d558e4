"""A fabric started by `ray up` on emulated Macs, with its changes to the shipped cluster.yaml."""

import hashlib
import json
import os
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.emulated_fleet import EmulatedFleet
from benchmarks.emulated_mac import HOME, ROOT, EmulatedMac, start_macs
from benchmarks.namespaces import state_folder

NAMES = ("studio", "mini", "air")
LAPTOP = "laptop"
KEY = "one-key-for-the-family"
OPERATOR_KEY = "one-key-for-the-operator-of-it"
CLIENT_ENVIRONMENT = {"MACFABRIC_API_KEY": KEY, "MACFABRIC_OPERATOR_KEY": OPERATOR_KEY}
KEYS = f"{HOME}/macfabric/keys"  # on the Macs
# On the laptop, whose owner made the certificates.
AUTHORITY = f"{HOME}/.macfabric/cluster/keys/ca.pem"
DRIVER = {  # needed by a program on a Mac to become a driver of Ray
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN_PATH": f"{KEYS}/ray.token",
    "RAY_USE_TLS": "1",
    "RAY_TLS_CA_CERT": f"{KEYS}/ca.pem",
    "RAY_TLS_SERVER_CERT": f"{KEYS}/member.pem",
    "RAY_TLS_SERVER_KEY": f"{KEYS}/member.key",
    "RAY_TMPDIR": f"{HOME}/macfabric",
    "PYTHONPATH": "",
}
UP_TIMEOUT_S = 300.0
READY_TIMEOUT_S = 300.0
RAY = str(ROOT / ".venv/bin/ray")

# Emulated Macs reach no package index. Their virtual environment is made from the Python that runs
# this test and uses its installed requirements; our own packages are those copied by `ray up`.
SHIPPED_SETUP = "setup_commands: [bash ~/macfabric/app/router/supervise/install.sh]"
CLOSE_KEYS = "chmod 700 ~/macfabric ~/macfabric/keys && chmod 600 ~/macfabric/keys/*"
MAKE_VENV = (
    "~/macfabric/venv/bin/python -c 'import sys' 2>/dev/null"
    " || {python} -m venv --without-pip ~/macfabric/venv"
)
INSTALL = (
    "cd ~/macfabric/venv && python=$PWD/bin/python"
    ' && packages=$($python -c "import site; print(site.getsitepackages()[0])")'
    " && printf '%s\\n' ~/macfabric/app {packages} > $packages/macfabric.pth"
    " && script() {{ printf '#!%s\\nimport sys\\nfrom %s import main\\nsys.exit(main())\\n'"
    " $python $2 > bin/$1; chmod 755 bin/$1; }}"
    " && script ray ray.scripts.scripts && script macfabric router.cli.main"
)

# One turn of one agent by the official SDK; with a file's name, turns until that file exists.
CLIENT = """
import json, os, sys
from openai import OpenAI
url, key, agent, code, *until = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key=key, timeout=100, max_retries=0)
fact = f"The vault code of {agent} is {code}."
filler = " ".join(f"word{i % 37}" for i in range(500))
messages = [{"role": "user", "content": f"{filler} {fact}"},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": f"The vault code of {agent} is"}]
while True:
    raw = client.chat.completions.with_raw_response.create(
        model="recall", messages=messages, max_tokens=12, extra_headers={"X-Agent-ID": agent})
    turn = {k.removeprefix("x-macfabric-"): v for k, v in raw.headers.items()}
    turn["text"] = raw.parse().choices[0].message.content
    print(json.dumps(turn), flush=True)
    if not until or os.path.exists(until[0]): break
"""


def client_argv(url: str, key: str, agent: str, code: str, *until: str) -> list[str]:
    """Return a laptop command that requests `code`, once or until a file exists."""
    trusting = ["env", f"SSL_CERT_FILE={AUTHORITY}", f"{ROOT}/.venv/bin/python", "-c", CLIENT]
    return [*trusting, url, key, agent, code, *until]


def digest(key: str) -> str:
    """Hash a key as the cluster file's comments describe."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def edited(shipped: str, head: str, workers: list[str]) -> str:
    """Return cluster.yaml edited as by its reader, and with the setup commands above."""
    text = shipped
    for old, new in (
        ("head_ip: 192.168.1.10", f"head_ip: {head}"),
        ("    - 192.168.1.11\n    - 192.168.1.12\n", "".join(f"    - {w}\n" for w in workers)),
        ("min_workers: 2", f"min_workers: {len(workers)}"),
        ("max_workers: 2", f"max_workers: {len(workers)}"),
        ("      host: 127.0.0.1\n", "      host: 0.0.0.0\n"),
        (
            "      # api_keys:\n      #   family: sha256:64-hexadecimal-digits\n",
            f"      api_keys:\n        family: {digest(KEY)}\n",
        ),
        (
            "      # operator_keys:\n      #   me: sha256:64-hexadecimal-digits\n",
            f"      operator_keys:\n        me: {digest(OPERATOR_KEY)}\n",
        ),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    python = os.path.realpath(sysconfig.get_config_var("BINDIR") + "/python3")
    packages = sysconfig.get_paths()["purelib"]
    commands = [CLOSE_KEYS, MAKE_VENV.format(python=python), INSTALL.format(packages=packages)]
    assert text.count(SHIPPED_SETUP) == 1
    return text.replace(SHIPPED_SETUP, f"setup_commands: {json.dumps(commands)}")


@dataclass(slots=True)
class RayUp:
    """Three Macs and the laptop from which they are started."""

    fleet: EmulatedFleet
    macs: list[EmulatedMac] = field(default_factory=list)

    @property
    def laptop(self) -> EmulatedMac:
        return self.macs[-1]

    @property
    def head(self) -> EmulatedMac:
        return self.macs[0]

    @property
    def url(self) -> str:
        return f"https://{self.head.host}:8000"

    def prepare(self) -> None:
        """Switch the Macs on, and prepare the laptop for `ray up` as docs/macs.md describes."""
        self.macs = start_macs(self.fleet, [*NAMES, LAPTOP])
        key = state_folder(self.fleet.number) / "key"
        self.laptop.write(".ssh/macfabric", key.read_text())
        shipped = (ROOT / "cluster.yaml").read_text()
        workers = [mac.host for mac in self.macs[1:-1]]
        self.laptop.write("cluster.yaml", edited(shipped, self.head.host, workers))
        argv = [str(ROOT / ".venv/bin/python"), "-m", "router.cli.main", "certs", "create"]
        self.on_laptop(*argv, f"{HOME}/cluster.yaml")

    def on_laptop(self, *argv: str, timeout_s: float = 60.0) -> str:
        """Run a program on the laptop; return its output."""
        done = self.laptop.run(argv, timeout_s, env=CLIENT_ENVIRONMENT)
        assert done.returncode == 0, f"{' '.join(argv)}\n{done.stdout[-4000:]}\n{self.logs()}"
        return done.stdout

    def macfabric(self, *argv: str) -> dict:
        """Run `macfabric` on the laptop against the fabric."""
        python = str(ROOT / ".venv/bin/python")
        output = self.on_laptop(python, "-m", "router.cli.main", *argv, "--url", self.url, "--json")
        return json.loads(output)

    def up(self) -> str:
        """Run `ray up`."""
        return self.on_laptop(RAY, "up", "-y", f"{HOME}/cluster.yaml", timeout_s=UP_TIMEOUT_S)

    def wait_nodes(self, count: int, timeout_s: float = READY_TIMEOUT_S) -> list[dict]:
        """Wait until `count` nodes serve; return the router's rows of them."""
        deadline_s = time.monotonic() + timeout_s
        python = str(ROOT / ".venv/bin/python")
        argv = [python, "-m", "router.cli.main", "nodes", "--url", self.url, "--json"]
        while True:
            done = self.laptop.run(argv, env=CLIENT_ENVIRONMENT)
            if done.returncode == 0:
                ready = [row for row in json.loads(done.stdout) if row["state"] == "ready"]
                if len(ready) >= count:
                    return ready
            assert time.monotonic() < deadline_s, f"{done.stdout}\n{self.logs()}"
            time.sleep(0.5)

    def logs(self) -> str:
        """Return the ends of the head's logs."""
        found = [
            *self.head.home.glob("macfabric/logs/*"),
            *self.head.home.glob(".macfabric/logs/*"),
        ]
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in found
            if path.is_file() and not Path(path).is_symlink()
        )
