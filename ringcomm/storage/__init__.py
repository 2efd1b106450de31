"""Files and folders that another user of the machine could have prepared, and what is kept in them."""
