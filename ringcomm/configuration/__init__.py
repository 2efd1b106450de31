"""Settings and memberships: where they come from (environment, other launchers), and what they mean."""
