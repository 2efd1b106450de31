"""The rendezvous: connects separately started processes to the ranks of one job, and finds root causes."""
