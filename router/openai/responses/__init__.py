"""OpenAI's Responses: requests, items, streams of events, and what is stored of them."""
