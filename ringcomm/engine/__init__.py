"""The engine: collectives matched by name, whatever order each rank submits them in."""
