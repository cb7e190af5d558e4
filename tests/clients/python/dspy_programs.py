"""DSPy: its model of OpenAI-like endpoints, and signatures by both adapters."""

import dspy
from features import AGAIN, CITY, HELLO, KEY, LONG_PROMPT, MODEL, V1, refused, run


def lm(model=MODEL):
    return dspy.LM(f"openai/{model}", api_base=V1, api_key=KEY, cache=False)


class City(dspy.Signature):
    """Name a city, and how many people live there."""

    question: str = dspy.InputField()
    city: str = dspy.OutputField()
    people: int = dspy.OutputField()


def predicted(adapter):
    with dspy.context(lm=lm(), adapter=adapter):
        return dspy.Predict(City)(question=CITY).toDict()


def plain():
    return lm()(HELLO)[0]["text"]


def structured():
    return predicted(dspy.JSONAdapter())


def structured_chat():
    return predicted(dspy.ChatAdapter())


def error():
    return refused(lambda: lm("nope")(HELLO), Exception)


def warm():
    model, messages = lm(), [{"role": "user", "content": LONG_PROMPT}]
    reply = model(messages=messages)[0]["text"]
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": AGAIN}]
    model(messages=messages)


run(plain, structured, structured_chat, error, warm)
