#!/bin/bash
# Lends one node to the run {{ job.run_directory }} until this job ends. `hvdtrain fill` submits it
# while nodes are idle; from the directory in which the run was submitted, by hand:
#   sbatch {{ file }}
# Shortly before the time limit, and if Slurm preempts the job with notice, the ranks of this node
# leave the run between two steps.

#SBATCH --job-name={{ job.name }}-donor
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --ntasks-per-node={{ job.ranks }}
{% if job.cpus %}
#SBATCH --cpus-per-task={{ job.cpus }}
{% endif %}
{% if job.gpus %}
#SBATCH --gpus-per-node={{ job.ranks }}
{% endif %}
{% if job.donor_queue %}
#SBATCH --partition={{ job.donor_queue }}
{% endif %}
#SBATCH --time={{ job.donor_limit }}
# Behind all other pending jobs.
#SBATCH --nice=100000
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={{ job.name }}-donors.log

{{ ('VENV=${VENV:-' ~ job.venv ~ '}').ljust(35) }} # the environment that has hvdtrain; all nodes must see it
{{ ('CONTAINER=${CONTAINER:-' ~ (job.image or '') ~ '}').ljust(35) }} # an Apptainer image with hvdtrain, instead of VENV
{% for module in job.modules %}
module load {{ module }}
{% endfor %}

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this file with sbatch}"
python=(python)
if [ -n "$CONTAINER" ]; then
    python=(apptainer exec "$CONTAINER" python)
else
    source "$VENV/bin/activate"
fi
# The agent starts the ranks of the node and needs all of its cores. At a preemption Slurm notifies
# what srun started, not this script.
unset SRUN_CPUS_PER_TASK SLURM_CPUS_PER_TASK
trap : TERM
code=0
srun --mpi=none --ntasks=1 --ntasks-per-node=1 --cpu-bind=none "${python[@]}" -m hvdtrain.cli \
    agent --run {{ job.run_directory }} --slots {{ job.ranks }} --wait 60 || code=$?
# 75: the node has left the run, or the run was preempted.
[ "$code" = 75 ] || exit "$code"
