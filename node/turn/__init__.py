"""One turn: claim, plan, prefix, decode, save."""
