"""`hvdtrain launch`: start a launcher, watch its hosts, and restart it after a failure."""
