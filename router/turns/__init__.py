"""One turn as the router sees it: placed, followed, gathered."""
