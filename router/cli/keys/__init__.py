"""Keys and certificates as the command line makes and reads them."""
