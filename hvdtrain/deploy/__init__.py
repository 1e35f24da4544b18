"""`hvdtrain deploy`: files that start a job on a cluster, from one description of the job."""
