"""`hvdtrain launch`: starts a launcher, watches its hosts, and starts it again after a failure."""
