"""How processes that know nothing of each other become the ranks of one job."""
