"""Report of a program under test: one line of JSON for each feature."""

import asyncio
import inspect
import json
import os
import sys
import traceback

URL, MODEL = os.environ["FABRIC_URL"], os.environ["FABRIC_MODEL"]
V1 = f"{URL}/v1"
KEY = "any"
HELLO = "Say hello."
WEATHER = "What is the weather in Paris?"
CITY = "Which city has how many people? Answer in the format."
ENDLESS = "Count without an end."
LONG_PROMPT = "My badge is 4711. " * 40
AGAIN = "Say hello again."


def weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"sunny in {city}"


def refused(ask, *kinds):
    """Return the type and message of the error that this raises."""
    try:
        ask()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


async def refused_async(pending, *kinds):
    try:
        await pending
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def run(*features):
    """Try all features, or those that are named on the command line."""
    wanted = sys.argv[1:]
    runner = asyncio.Runner()  # clients keep connections of the loop that they were first used on
    for feature in features:
        if wanted and feature.__name__ not in wanted:
            continue
        try:
            is_async = inspect.iscoroutinefunction(feature)
            line = {"result": runner.run(feature()) if is_async else feature()}
        except Exception:  # noqa: BLE001 - the report is the result
            line = {"error": traceback.format_exc()[-3_000:]}
        print("\n" + json.dumps({"feature": feature.__name__, **line}), flush=True)
    runner.close()
