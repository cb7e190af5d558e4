"""How families of models write: thoughts, calls and channels, read from an answer as it comes."""
