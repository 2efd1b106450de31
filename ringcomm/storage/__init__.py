"""Files and folders that another user of the machine could have prepared, and job secrets and results."""
