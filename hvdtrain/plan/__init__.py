"""`hvdtrain plan`: predict the cost of a run on a cluster from its cost on this host."""
