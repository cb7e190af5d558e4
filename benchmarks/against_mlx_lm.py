"""Cold TTFT and one stream's decode speed, side by side with mlx_lm.server, in one run.

Both serve the same model folder on this machine; requests alternate, every prompt begins
with a word of its own, and the figure is the median of the ratios of neighbouring pairs.

    python benchmarks/against_mlx_lm.py --model node/bundled/recall --json
"""

import argparse
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import open_directly

START_TIMEOUT_S = 120.0
WORDS = [
    "river",
    "stone",
    "lantern",
    "copper",
    "meadow",
    "violin",
    "harbor",
    "winter",
    "saddle",
    "orchard",
]


@dataclass(frozen=True, slots=True)
class Sample:
    """One streamed answer."""

    ttft_s: float
    tokens_per_s: float
    completion_tokens: int
    prompt_tokens: int


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running(command: list[str], url: str, health: str, cwd: str) -> Iterator[str]:
    """Run a server until the block ends; wait until it says that it is healthy."""
    log = Path(cwd) / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=cwd)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                open_directly(f"{url}{health}", 2).close()
                break
            except OSError:  # 503 while no node is ready counts as one
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{command[:4]} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def ask(url: str, model: str, prompt: str, max_tokens: int) -> Sample:
    """Stream one chat answer and time its tokens."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(  # noqa: S310 - loopback
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    began = time.perf_counter()
    stamps: list[float] = []
    usage: dict[str, Any] = {}
    with open_directly(request, 600) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                stamps.append(time.perf_counter())
    if not stamps:
        sys.exit(f"{url} answered nothing")
    tokens = int(usage.get("completion_tokens") or len(stamps))
    spent = stamps[-1] - stamps[0]
    rate = (tokens - 1) / spent if tokens > 1 and spent > 0 else 0.0
    return Sample(stamps[0] - began, rate, tokens, int(usage.get("prompt_tokens") or 0))


def prompts(count: int, words: int) -> Iterator[str]:
    """Yield prompts that share no beginning."""
    for number in range(count):
        rng = random.Random(number)
        yield f"{rng.getrandbits(60):x} " + " ".join(rng.choice(WORDS) for _ in range(words))


def compare(ours: str, theirs: str, args: argparse.Namespace) -> dict[str, Any]:
    """Alternate requests and relate each pair."""
    pairs = []
    asked = list(prompts(args.rounds + 1, args.words))
    for number, prompt in enumerate(asked):
        sides = [("macfabric", ours, Path(args.model).name), ("mlx_lm", theirs, args.model)]
        if number % 2:
            sides.reverse()
        pair = {n: ask(url, model, prompt, args.max_tokens) for n, url, model in sides}
        if number:  # the first pair warms both up
            pairs.append(pair)
            if not args.json:
                print({name: asdict(sample) for name, sample in pair.items()}, file=sys.stderr)
    ttft = [p["macfabric"].ttft_s / p["mlx_lm"].ttft_s for p in pairs]
    rate = [
        p["macfabric"].tokens_per_s / p["mlx_lm"].tokens_per_s
        for p in pairs
        if p["mlx_lm"].completion_tokens == args.max_tokens  # shorter answers time nothing
    ]
    if not rate:
        sys.exit("no answer was long enough to time: lower --max-tokens")
    return {
        "model": args.model,
        "prompt_tokens": pairs[0]["macfabric"].prompt_tokens,
        "completion_tokens": [p["macfabric"].completion_tokens for p in pairs],
        "ttft_s": {n: statistics.median(p[n].ttft_s for p in pairs) for n in pairs[0]},
        "tokens_per_s": {n: statistics.median(p[n].tokens_per_s for p in pairs) for n in pairs[0]},
        "ttft_ratio": {"median": statistics.median(ttft), "worst": max(ttft)},
        "decode_ratio": {"median": statistics.median(rate), "worst": min(rate)},
    }


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="node/bundled/recall", help="a folder mlx-lm loads")
    parser.add_argument("--words", type=int, default=1_500, help="length of each prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve())
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for name in ("a", "b"):
            (Path(folder) / name).mkdir()
        port, other = free_port(), free_port()
        theirs = [sys.executable, "-m", "mlx_lm.server", "--model", args.model, "--port", str(port)]
        ours = [
            sys.executable,
            "-m",
            "router.cli.main",
            "up",
            "--nodes",
            "1",
            "--model",
            args.model,
            "--port",
            str(other),
            "--data",
            f"{folder}/b/data",
        ]
        there = stack.enter_context(
            running(theirs, f"http://127.0.0.1:{port}", "/health", f"{folder}/a")
        )
        here = stack.enter_context(
            running(ours, f"http://127.0.0.1:{other}", "/healthz", f"{folder}/b")
        )
        result = compare(here, there, args)
    print(json.dumps(result, indent=None if args.json else 2))


if __name__ == "__main__":
    main()
