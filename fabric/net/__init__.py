"""The data plane as arithmetic: frames, tickets, handshakes, links, compression."""
