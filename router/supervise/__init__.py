"""Processes of a fabric, Ray's among them: started, watched, ended."""
