#!/bin/bash
# hvdtrain in a Slurm job that comes back after its time limit and after a preemption.
# slurm/README.md says how it is used. From the repository's directory:
#   sbatch {{ file }} --config gpt-nano --train.steps 300
# What follows the file's name goes to hvdtrain.train; sbatch's own options come before it
# and win over those below.

# --- yours to edit ---------------------------------------------------------------
#SBATCH --job-name={{ job.name }}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node={{ job.ranks }}
{{ '#' if job.cpus is none }}#SBATCH --cpus-per-task={{ job.cpus or 8 }}
{{ '#' if not job.gpus }}#SBATCH --gpus-per-node={{ job.ranks }}
{{ '#' if job.queue is none }}#SBATCH --partition={{ job.queue or 'NAME' }}
#SBATCH --time={{ job.limit }}
# The ranks are told to save {{ job.grace }} s before the time limit (Slurm: up to 60 s earlier); the same
# number stands in GRACE_SECONDS below.
#SBATCH --signal=B:USR1@{{ job.grace }}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

LAUNCHER=${LAUNCHER:-srun}          # srun, mpirun where Slurm has no PMIx, or launch: mpirun
                                    # that is started again when a rank or a node dies
{{ ('VENV=${VENV:-' ~ job.venv ~ '}').ljust(35) }} # the environment that has hvdtrain; all nodes must see it
{{ ('CONTAINER=${CONTAINER:-' ~ (job.image or '') ~ '}').ljust(35) }} # an Apptainer image with hvdtrain, instead of VENV
{{ ('GRACE_SECONDS=' ~ job.grace).ljust(35) }} # a save that would take longer is not begun
MAX_RESTARTS=${MAX_RESTARTS:-20}    # after that many the job ends, with exit code 75
{% for module in job.modules %}
module load {{ module }}
{% else %}
# module load openmpi
{% endfor %}
# ---------------------------------------------------------------------------------

set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
python=(python)
arguments=(
{% if job.run_id is none %}
    --run.id "slurm-$SLURM_JOB_ID" # a requeued job keeps its number: it resumes its own run
{% endif %}
    --preempt.grace_seconds "$GRACE_SECONDS"
{% for key in job.keys %}
    {{ key | sh }}
{% endfor %}
    "$@"
)
if [ -n "$CONTAINER" ]; then
    python=(apptainer exec "$CONTAINER" python)
else
    source "$VENV/bin/activate"
fi
# Of sbatch's options srun takes over all but this one.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK

case $LAUNCHER in
# As mpirun does: a rank that dies ends the others, which would wait for it until the time limit.
srun) start=(srun --mpi=pmix --kill-on-bad-exit=1 "${python[@]}" -m hvdtrain.train) ;;
# Nodes come from the allocation. Bound to one core, a rank would share it with its Horovod.
mpirun) start=(mpirun -np "$SLURM_NTASKS" --bind-to none "${python[@]}" -m hvdtrain.train) ;;
launch) start=("${python[@]}" -m hvdtrain.cli launch --slurm --) ;;
*)
    echo "LAUNCHER is srun, mpirun or launch, not $LAUNCHER" >&2
    exit 2
    ;;
esac
restarts=${SLURM_RESTART_COUNT:-0}
echo "{{ file }}: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart $restarts of $MAX_RESTARTS"

"${start[@]}" "${arguments[@]}" &
launcher=$!

# SIGUSR1 comes to this script alone; srun and mpirun pass it on to every rank. SIGTERM means
# that Slurm ends the job: it tells the ranks itself, and whether the job comes back (requeue)
# or not (scancel) is decided.
told='' ended=''
trap 'interrupted=yes told=yes; kill -USR1 "$launcher" 2>/dev/null || true' USR1
trap 'interrupted=yes ended=yes' TERM
while :; do
    interrupted='' code=0
    wait "$launcher" || code=$? # a trap ends `wait`, not the launcher
    [ -n "$interrupted" ] || break
done

# The ranks end with 75, but for two cases: told while they start or end, SIGUSR1 ends them; and
# a preemption may reach mpirun's helpers on the other nodes before the ranks.
preempted() {
    [ "$code" = 75 ] && return
    [ "$code" -gt 128 ] || return
    [ -n "$told" ] || [[ $(scontrol show job "$SLURM_JOB_ID") =~ PreemptTime=[1-9] ]]
}
[ -z "$ended" ] && preempted || exit "$code"
by_hand="continue with: sbatch {{ file }} --run.id {{ job.run_id or "slurm-$SLURM_JOB_ID" }} ..."
if [ "$restarts" -ge "$MAX_RESTARTS" ]; then
    echo "{{ file }}: not requeued after $restarts restarts (MAX_RESTARTS); $by_hand" >&2
elif scontrol requeue "$SLURM_JOB_ID"; then
    echo "{{ file }}: requeued; it resumes from its newest checkpoint"
else
    echo "{{ file }}: Slurm refuses to requeue; $by_hand" >&2
fi
exit 75
