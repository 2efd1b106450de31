"""``ringrun doctor``: finds problems that keep hosts from training together, before a job is started."""
