"""Links and fabrics: how bytes get from one rank to another."""
