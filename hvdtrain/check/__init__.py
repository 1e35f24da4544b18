"""`hvdtrain check`: short runs of a script on several numbers of ranks, compared bitwise."""
