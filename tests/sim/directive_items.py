"""Directives as clients write them, each with its expected effect."""

from tests.sim.directives import SYSTEM, TOOL, DirectiveEdit, name_of, numbered

CONTENT, RESULT, NUMBER, NUMBERS, CHARS, TEXT = range(6)
SPAN_CHARS_MAX = 20


def draw_items(random, talk, known, operation, *, may_place):
    """Draw the directives of one operation, as API items and as the judge's edits.

    With `may_place` the agent's record has exactly the talk's messages, so numbers may name them.
    """
    free = _free(talk.messages, known)
    items, edits = [], []
    kinds = [CONTENT, RESULT]
    if may_place:
        kinds += [NUMBER, NUMBERS, CHARS, TEXT]
    for _ in range(random.choice([1, 1, 2, 3])):
        options = {
            "mode": random.choice(["forget", "exact", "amortize", "amortize"]),
            "replacement": random.choice([None, "", "[cleared]", talk.say()]),
        }
        item_and_places = _draw_item(random, random.choice(kinds), talk.messages, free)
        if item_and_places is None:
            continue
        item, places = item_and_places
        items.append(item | {name: each for name, each in options.items() if each is not None})
        for at, place in enumerate(places):
            text = options["replacement"] if at == 0 else None
            if text is None and ("result_of" in place or "span" in place):
                text = ""
            edits.append(DirectiveEdit(operation, options["mode"], text, **place))
    edits.sort(key=lambda each: each.nth is not None)  # those placed by the record come last
    return items, edits


def superseding(operation, mode, earlier, later):
    """Return the edit by which a later result supersedes an earlier one."""
    return DirectiveEdit(
        operation, mode, f"[superseded by the result of {later}]", result_of=earlier
    )


def _free(messages, known):
    """List the numbers of messages without any directive so far."""
    edits = [each for state in known.past for each in state]
    pairs = enumerate(numbered(messages))
    is_free = {
        number: message["role"] != SYSTEM
        and message["content"] != ""
        and not any(each.concerns(message, nth) for each in edits)
        for number, (message, nth) in pairs
    }
    return [number for number, free in is_free.items() if free]


def _draw_item(random, kind, messages, free):
    """Draw one item and the places that it edits; None if no message fits."""
    if kind == RESULT:
        return _by_result(random, messages)
    if not free:
        return None
    number = free.pop(random.randrange(len(free)))
    if kind == CONTENT:
        return _by_content(random, messages, number, free)
    if not messages[number]["content"]:
        return None  # the API rejects edits of empty content
    if kind == NUMBER:
        return {"message": number}, [_place(messages, number)]
    if kind == NUMBERS:
        return _by_range(random, messages, number, free)
    return _by_span(random, kind, messages, number)


def _by_result(random, messages):
    calls = sorted({m["tool_call_id"] for m in messages if m["role"] == TOOL})
    if not calls:
        return None
    call = random.choice(calls)
    return {"tool_call_id": call}, [{"result_of": call}]


def _by_content(random, messages, number, free):
    message = messages[number]
    item = {"message": {"role": message["role"], "content": message["content"]}}
    place = {"target": name_of(message)}
    free[:] = [other for other in free if name_of(messages[other]) != name_of(message)]
    if random.random() < 0.3 and message["content"]:
        item["start"], item["end"] = place["span"] = _span(random, message["content"])
    return item, [place]


def _by_range(random, messages, first, free):
    last = first
    while last + 1 in free and random.random() < 0.6:
        last += 1
        free.remove(last)
    numbers = range(first, last + 1)
    return {"messages": {"first": first, "last": last}}, [_place(messages, at) for at in numbers]


def _by_span(random, kind, messages, number):
    text, place = messages[number]["content"], _place(messages, number)
    if not text:
        return None
    start, end = place["span"] = _span(random, text)
    if kind == CHARS:
        return {"message": number, "start": start, "end": end}, [place]
    phrase = text[start:end]
    if sum(_count(each["content"], phrase) for each in messages) != 1:
        return None
    return {"text": phrase}, [place]


def _count(text, phrase):
    """Count the occurrences of a phrase, overlapping ones included."""
    return sum(text.startswith(phrase, at) for at in range(len(text)))


def _place(messages, number):
    message, nth = list(numbered(messages))[number]
    return {"target": name_of(message), "nth": nth}


def _span(random, text):
    start = random.randrange(len(text))
    return start, min(len(text), start + random.randrange(1, SPAN_CHARS_MAX))
