"""``ringrun doctor``: finds what keeps hosts from training together, before a job is started."""
