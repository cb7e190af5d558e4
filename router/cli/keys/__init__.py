"""Keys and certificates that the command line makes and reads."""
