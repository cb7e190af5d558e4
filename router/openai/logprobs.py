"""Log probabilities as OpenAI spells them in chats and responses."""

from typing import Any

from fabric.turn.generation import TokenLogprob


def logprob_form(token: TokenLogprob) -> dict[str, Any]:
    """Spell one token's, with the alternatives to it."""
    alternatives = [_alone(*alternative) for alternative in token.alternatives]
    return {**_alone(token.token, token.logprob), "top_logprobs": alternatives}


def _alone(token: str, logprob: float | None) -> dict[str, Any]:
    spelled = list(token.encode("utf-8", "surrogatepass"))
    return {"token": token, "logprob": logprob, "bytes": spelled}
