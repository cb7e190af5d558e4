"""The command line `llm`, configured by its own file of models."""

import json
import os
import subprocess
import sys
from pathlib import Path

from features import AGAIN, CITY, HELLO, KEY, LONG_PROMPT, MODEL, V1, WEATHER, run

LLM = str(Path(sys.executable).with_name("llm"))
HOME = Path(os.environ["HOME"]) / "llm"
HOME.mkdir()
ENTRIES = [
    {
        "model_id": name,
        "model_name": name,
        "api_base": V1,
        "supports_tools": True,
        "supports_schema": True,
    }
    for name in (MODEL, "nope")
]
(HOME / "extra-openai-models.yaml").write_text(json.dumps(ENTRIES))
FUNCTION = """def weather(city: str) -> str:
    "Tell the weather in a city."
    return f"sunny in {city}"
"""


def run_llm(*arguments, model=MODEL):
    command = [LLM, *arguments, "--key", KEY]
    command += [] if "-c" in arguments else ["-m", model]
    environment = {**os.environ, "LLM_USER_PATH": str(HOME)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip()


def plain():
    return run_llm(HELLO, "--no-stream")


def streamed():
    return [run_llm(HELLO)]


def tool():
    return run_llm("--functions", FUNCTION, WEATHER).splitlines()[-1]


def structured():
    return json.loads(run_llm("--schema", "city, people int", CITY))


def error():
    return run_llm(HELLO, model="nope")


def warm():
    run_llm(LONG_PROMPT)
    run_llm("-c", AGAIN)


run(plain, streamed, tool, structured, error, warm)
