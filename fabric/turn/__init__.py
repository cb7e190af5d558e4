"""One turn as messages and arithmetic: requests, events, prompts matched against records."""
