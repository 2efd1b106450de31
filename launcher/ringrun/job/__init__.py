"""One job: preparation, start, supervision, restarts."""
