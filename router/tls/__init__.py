"""The fabric's certificates, and the TLS contexts made of them."""
