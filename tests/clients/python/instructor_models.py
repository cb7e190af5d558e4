"""Instructor: one model of the answer, by each of its modes."""

import instructor
import openai
from features import CITY, KEY, MODEL, V1, refused, run
from instructor import Mode
from pydantic import BaseModel

client = openai.OpenAI(base_url=V1, api_key=KEY)


class City(BaseModel):
    city: str
    people: int


def extract(mode, model=MODEL, **more):
    return instructor.from_openai(client, mode=mode).chat.completions.create(
        model=model, messages=[{"role": "user", "content": CITY}], response_model=City, **more
    )


def structured():
    return extract(Mode.TOOLS).model_dump()


def structured_json():
    return extract(Mode.JSON).model_dump()


def structured_schema():
    return extract(Mode.JSON_SCHEMA).model_dump()


def structured_markdown():
    return extract(Mode.MD_JSON).model_dump()


def structured_partial():
    partials = instructor.from_openai(client).chat.completions.create_partial(
        model=MODEL, messages=[{"role": "user", "content": CITY}], response_model=City
    )
    return list(partials)[-1].model_dump()


def error():
    return refused(lambda: extract(Mode.JSON_SCHEMA, "nope", max_retries=1), Exception)


run(structured, structured_json, structured_schema, structured_markdown, structured_partial, error)
