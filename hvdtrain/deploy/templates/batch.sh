#!/bin/bash
{% set submit = {"pbs": "qsub " ~ file, "lsf": "bsub < " ~ file, "none": "bash " ~ file}[scheduler] %}
{% set starter = {"pbs": "PBS", "lsf": "LSF", "none": "mpirun, without a batch system"}[scheduler] %}
# hvdtrain under {{ starter }}. From the directory in which it should train:
#   {{ submit }}
{% if scheduler == "none" %}
# Arguments after the file name are passed to hvdtrain.train.
{% endif %}

{% if scheduler == "pbs" %}
{% set gpus = ":ngpus=%d" % job.ranks if job.gpus else "" %}
#PBS -N {{ job.name }}
#PBS -l select={{ job.nodes }}:ncpus={{ job.ranks * (job.cpus or 1) }}:mpiprocs={{ job.ranks }}{{ gpus }}
#PBS -l place=scatter
#PBS -l walltime={{ job.limit }}
{% if job.queue %}
#PBS -q {{ job.queue }}
{% endif %}
# If a node dies, the job is restarted.
#PBS -r y
#PBS -j oe
{% elif scheduler == "lsf" %}
#BSUB -J {{ job.name }}
#BSUB -n {{ job.np }}
#BSUB -R "span[ptile={{ job.ranks }}]"
{% if job.cpus %}
#BSUB -R "affinity[core({{ job.cpus }})]"
{% endif %}
{% if job.gpus %}
#BSUB -gpu "num={{ job.ranks }}"
{% endif %}
#BSUB -W {{ job.limit[:-3] }}
{% if job.queue %}
#BSUB -q {{ job.queue }}
{% endif %}
# If a node dies, or after exit code 75 (preempted), the job is requeued.
#BSUB -r
#BSUB -Q "75"
#BSUB -o {{ job.name }}-%J.log
{% else %}
HOSTS=${HOSTS:-{{ job.hosts | join(",") }}}
{% endif %}

LAUNCHER=${LAUNCHER:-mpirun}        # mpirun, or launch: mpirun that is restarted when a rank
                                    # or a host dies
{{ ('VENV=${VENV:-' ~ job.venv ~ '}').ljust(35) }} # the environment that has hvdtrain; all hosts must see it
{{ ('CONTAINER=${CONTAINER:-' ~ (job.image or '') ~ '}').ljust(35) }} # an Apptainer image with hvdtrain, instead of VENV
{{ ('GRACE_SECONDS=' ~ job.grace).ljust(35) }} # a save that would take longer is not started
{% if scheduler != "none" %}
{{ ('LIMIT_SECONDS=' ~ (job.limit_seconds // 60 * 60 if scheduler == "lsf" else job.limit_seconds)).ljust(35) }} # the time limit above
{% endif %}
{% if scheduler == "pbs" %}
MAX_RESTARTS=${MAX_RESTARTS:-20}    # after this many restarts the job ends with exit code 75
{% endif %}
{% for module in job.modules %}
module load {{ module }}
{% endfor %}

set -euo pipefail
{% if scheduler == "pbs" %}
cd "$PBS_O_WORKDIR"
# A job that is submitted again has another number, so it receives the ID of its run.
run=${HVDTRAIN_RUN:-{{ job.run_id or "pbs-${PBS_JOBID%%.*}" }}}
nodes=$PBS_NODEFILE
{% elif scheduler == "lsf" %}
cd "$LS_SUBCWD"
# A requeued job keeps its number.
run={{ job.run_id or "lsf-$LSB_JOBID" }}
nodes=$LSB_DJOB_HOSTFILE
{% else %}
run={{ job.run }}
{% endif %}
arguments=(
    --run.id "$run"
    --preempt.grace_seconds "$GRACE_SECONDS"
{% for key in job.keys %}
    {{ key | sh }}
{% endfor %}
{% if scheduler == "none" %}
    "$@"
{% endif %}
)
if [ -n "$CONTAINER" ]; then
    python=(apptainer exec "$CONTAINER" python)
else
    python=("$(cd "$VENV" && pwd)/bin/python") # the same path on every host
fi
# The ranks compare their hosts with these, because an MPI may ignore them.
{% if scheduler == "none" %}
export HVDTRAIN_HOSTS=$HOSTS
{% else %}
export HVDTRAIN_HOSTS=$(sort "$nodes" | uniq -c | awk '{ print $2 ":" $1 }' | paste -sd,)
{% endif %}
# Environment variables for ranks on other hosts (Hydra passes all). Only names, because every user
# of a host can read the arguments of a process.
exported=()
for name in $(compgen -e); do
    case $name in
    PATH | LD_LIBRARY_PATH | HVDTRAIN_* | HOROVOD_* | NCCL_* | OMP_* | CUDA_*) exported+=(-x "$name") ;;
    esac
done
# The options of the MPI on PATH. Bound to one core, a rank would share it with Horovod's thread.
case $(mpirun --version 2>&1) in
{% for pattern, one in mpi.SHELL_PATTERNS %}
{{ pattern }})
{% if scheduler != "none" %}
    hosts=({{ mpi.host_file_option(one) }} "$nodes")
{% elif one.is_open_mpi %}
    hosts=(-H "$HOSTS")
{% elif one.name == "intelmpi" %}
    # It reads slots from a file only, which is removed and stays open.
    nodes=$(mktemp)
    tr , '\n' <<<"$HOSTS" >"$nodes"
    exec {file}<"$nodes"
    rm "$nodes"
    hosts=(-machinefile "/proc/$$/fd/$file")
{% else %}
    hosts=(-hosts "$HOSTS")
{% endif %}
    mpirun=({{ mpi.program(one) }} -np {{ job.np }} "${hosts[@]}" {{ mpi.binding(one) | join(" ") }}{{ ' "${exported[@]}"' if one.is_open_mpi }})
    ;;
{% endfor %}
esac
case $LAUNCHER in
mpirun) start=("${mpirun[@]}" "${python[@]}" -m hvdtrain.train) ;;
{% if scheduler == "none" %}
launch) start=("${python[@]}" -m hvdtrain.cli launch --hosts "$HOSTS" --) ;;
{% else %}
launch) start=("${python[@]}" -m hvdtrain.cli launch --hostfile "$nodes" --) ;;
{% endif %}
*)
    echo "LAUNCHER is mpirun or launch, not $LAUNCHER" >&2
    exit 2
    ;;
esac
{% if scheduler == "none" %}
# After kill -USR1 to this script, which becomes the launcher, the ranks save and exit with 75; the
# same command resumes. Do not send SIGTERM to mpirun: it may give the ranks a second or less.
exec "${start[@]}" "${arguments[@]}" </dev/null
{% else %}
# The ranks are asked to save before the time limit, by SIGUSR1: the scheduler itself would send
# SIGTERM, after which mpirun gives them about a second.
timeout --foreground --preserve-status --signal=USR1 $((LIMIT_SECONDS - GRACE_SECONDS)) \
    "${start[@]}" "${arguments[@]}" &
launcher=$!

# SIGTERM: the scheduler ends the job.
ended=''
trap 'interrupted=yes; kill -USR1 "$launcher" 2>/dev/null || true' USR1 USR2
trap 'interrupted=yes ended=yes; kill -TERM "$launcher" 2>/dev/null || true' TERM
while :; do
    interrupted='' code=0
    wait "$launcher" || code=$? # a trap ends `wait`, not the launcher
    [ -n "$interrupted" ] || break
done
[ "$code" != -1 ] || code=75 # a signal came as the launcher ended: bash has lost its code
{% if scheduler == "lsf" %}
exit "$code" # 75: LSF puts the job back into the queue (-Q)
{% else %}
[ -z "$ended" ] && [ "$code" = 75 ] || exit "$code"
restarts=${HVDTRAIN_RESTARTS:-0}
by_hand="continue with: qsub -v HVDTRAIN_RUN=$run {{ file }}"
if [ "$restarts" -ge "$MAX_RESTARTS" ]; then
    echo "{{ file }}: not submitted again after $restarts restarts (MAX_RESTARTS); $by_hand" >&2
elif qsub -v "HVDTRAIN_RUN=$run,HVDTRAIN_RESTARTS=$((restarts + 1))" {{ file }}; then
    echo "{{ file }}: submitted again; it resumes from its newest checkpoint"
else
    echo "{{ file }}: PBS refuses a job from within a job; $by_hand" >&2
fi
exit 75
{% endif %}
{% endif %}
