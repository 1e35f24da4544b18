"""`hvdtrain deploy`: the files with which a job is started on a cluster, written once for all."""
