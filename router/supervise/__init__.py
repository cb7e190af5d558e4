"""Start, watch and end the processes of a fabric, including Ray's."""
