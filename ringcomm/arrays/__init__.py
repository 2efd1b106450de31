"""Between the caller's arrays and the flat ones that travel."""
