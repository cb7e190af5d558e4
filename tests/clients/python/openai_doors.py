"""OpenAI's SDK by the names under which a fabric is reached: its own, allowed ones and others."""

import os

import openai
from features import HELLO, KEY, MODEL, V1, refused, run


def finish_reason_via(host):
    client = openai.OpenAI(
        base_url=V1, api_key=KEY, max_retries=0, default_headers={"Host": host} if host else {}
    )
    messages = [{"role": "user", "content": HELLO}]
    response = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24)
    return response.choices[0].finish_reason


def own():
    return finish_reason_via(None)


def allowed():
    return finish_reason_via(os.environ["ALLOWED_HOST"])


def other():
    return refused(lambda: finish_reason_via("rebound.example"), openai.APIStatusError)


run(own, allowed, other)
