#!/bin/bash
# hvdtrain in a Slurm job that is requeued after its time limit and after a preemption. From the
# directory in which it should train:
#   sbatch {{ file }} --config gpt-nano --train.duration 300
# Arguments after the file name are passed to hvdtrain.train; sbatch's options come before it and
# take precedence over the options below.

#SBATCH --job-name={{ job.name }}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node={{ job.ranks }}
{% if job.cpus %}
#SBATCH --cpus-per-task={{ job.cpus }}
{% endif %}
{% if job.gpus %}
#SBATCH --gpus-per-node={{ job.ranks }}
{% endif %}
{% if job.queue %}
#SBATCH --partition={{ job.queue }}
{% endif %}
#SBATCH --time={{ job.limit }}
# The ranks are asked to save {{ job.grace }} s before the time limit (Slurm: up to 60 s earlier); the same
# number is in GRACE_SECONDS below.
#SBATCH --signal=B:USR1@{{ job.grace }}
{% if launcher == "elastic" %}
# The run continues without a node that fails.
#SBATCH --no-kill
{% endif %}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# srun, mpirun (if Slurm has no PMIx), launch: mpirun that is restarted when a rank or a node dies,
# or elastic: when a rank or a node dies, the other ranks continue; no ssh. Submit an elastic job with
# sbatch --no-kill: it then continues without a node that fails.
LAUNCHER=${LAUNCHER:-{{ launcher }}}
{{ ('VENV=${VENV:-' ~ job.venv ~ '}').ljust(35) }} # the environment that has hvdtrain; all nodes must see it
{{ ('CONTAINER=${CONTAINER:-' ~ (job.image or '') ~ '}').ljust(35) }} # an Apptainer image with hvdtrain, instead of VENV
{{ ('GRACE_SECONDS=' ~ job.grace).ljust(35) }} # a save that would take longer is not started
MAX_RESTARTS=${MAX_RESTARTS:-20}    # after this many restarts the job ends with exit code 75
{% for module in job.modules %}
module load {{ module }}
{% endfor %}

set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this file with sbatch}"
python=(python)
arguments=(
{% if job.run_id is none %}
    --run.id "slurm-$SLURM_JOB_ID" # a requeued job keeps its number: it resumes its own run
{% else %}
    --run.id {{ job.run_id }}
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
# srun inherits all of sbatch's options except this one.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# Otherwise the barrier at the end of MPI_Init waits for no other node if there are fewer nodes than
# Slurm's TreeWidth, and the first message of a fast rank ends a slow one by SIGSEGV.
export SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring}

# The options of the MPI on PATH; nodes come from the allocation. Bound to one core, a rank would
# share it with Horovod's thread.
case $(mpirun --version 2>&1) in
{% for pattern, one in mpi.SHELL_PATTERNS %}
{{ pattern }}) mpirun=({{ mpi.program(one) }} -np "$SLURM_NTASKS" {{ mpi.binding(one) | join(" ") }}) ;;
{% endfor %}
esac
case $LAUNCHER in
# As with mpirun, a rank that dies ends the other ranks, which would otherwise wait for it.
srun) start=(srun --mpi=pmix --kill-on-bad-exit=1 "${python[@]}" -m hvdtrain.train) ;;
mpirun) start=("${mpirun[@]}" "${python[@]}" -m hvdtrain.train) ;;
launch) start=("${python[@]}" -m hvdtrain.cli launch --slurm --) ;;
# One task per node, which starts the ranks of the node and needs all of its cores.
elastic)
    unset SRUN_CPUS_PER_TASK SLURM_CPUS_PER_TASK
    start=(srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --no-kill --kill-on-bad-exit=0)
    start+=(--cpu-bind=none "${python[@]}" -m hvdtrain.cli launch)
    start+=(${SLURM_NTASKS_PER_NODE:+--slots "$SLURM_NTASKS_PER_NODE"} --)
    ;;
*)
    echo "LAUNCHER is srun, mpirun, launch or elastic, not $LAUNCHER" >&2
    exit 2
    ;;
esac
restarts=${SLURM_RESTART_COUNT:-0}
echo "{{ file }}: job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, restart $restarts of $MAX_RESTARTS"

"${start[@]}" "${arguments[@]}" &
launcher=$!

# Only this script receives SIGUSR1; srun and mpirun forward it to every rank. SIGTERM means that
# Slurm ends the job: Slurm signals the ranks itself, and has decided whether the job is requeued.
asked='' ended=''
trap 'interrupted=yes asked=yes; kill -USR1 "$launcher" 2>/dev/null || true' USR1 USR2
trap 'interrupted=yes ended=yes' TERM
while :; do
    interrupted='' code=0
    wait "$launcher" || code=$? # a trap ends `wait`, not the launcher
    [ -n "$interrupted" ] || break
done
[ "$code" != -1 ] || code=75 # a signal came as the launcher ended: bash has lost its code

# The ranks exit with 75, with two exceptions: SIGUSR1 ends ranks that are starting or ending, and
# a preemption may reach mpirun's helpers on the other nodes before the ranks.
preempted() {
    [ "$code" = 75 ] && return
    [ "$code" -gt 128 ] || return
    [ -n "$asked" ] || [[ $(scontrol show job "$SLURM_JOB_ID") =~ PreemptTime=[1-9] ]]
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
