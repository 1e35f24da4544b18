"""`hvdtrain plan`: what a run would take on a cluster, from what it takes here."""
