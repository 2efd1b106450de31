"""One job: put together, started, supervised to its end."""
