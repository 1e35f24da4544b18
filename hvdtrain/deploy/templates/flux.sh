#!/bin/bash
# hvdtrain under Flux, elastic: if a rank dies, the other ranks continue. From the directory in which
# it should train:
#   flux batch {{ file }}
# Arguments after the file name are passed to hvdtrain.train; options of flux batch come before it
# and take precedence over the options below. The job is submitted again with all of them.
#flux: --job-name={{ job.name }}
#flux: --nodes={{ job.nodes }} --exclusive
{% if job.cpus or job.gpus %}
#flux: --nslots={{ job.nodes }}{{ ' --cores-per-slot=%d' % (job.ranks * job.cpus) if job.cpus }}{{ ' --gpus-per-slot=%d' % job.ranks if job.gpus }}
{% endif %}
{% if job.queue %}
#flux: --queue={{ job.queue }}
{% endif %}
#flux: --time-limit={{ job.limit_seconds }}s
#flux: --signal=SIGUSR1@{{ job.grace }}s
#flux: --output={{ job.name }}-{{ '{{id}}' }}.log

{{ ('VENV=${VENV:-' ~ job.venv ~ '}').ljust(35) }} # the environment that has hvdtrain; all nodes must see it
{{ ('CONTAINER=${CONTAINER:-' ~ (job.image or '') ~ '}').ljust(35) }} # an Apptainer image with hvdtrain, instead of VENV
{{ ('GRACE_SECONDS=' ~ job.grace).ljust(35) }} # a save that would take longer is not started
MAX_RESTARTS=${MAX_RESTARTS:-20}    # after this many restarts the job ends with exit code 75
{% for module in job.modules %}
module load {{ module }}
{% endfor %}

set -euo pipefail
# A job that is submitted again has another number, so it receives the ID of its run.
run=${HVDTRAIN_RUN:-{{ job.run_id or '$(flux job id --to=f58plain "$FLUX_ENCLOSING_ID")' }}}
arguments=(
    --run.id "$run"
    --preempt.grace_seconds "$GRACE_SECONDS"
{% for key in job.keys %}
    {{ key | sh }}
{% endfor %}
    "$@"
)
if [ -n "$CONTAINER" ]; then
    python=(apptainer exec "$CONTAINER" python)
else
    python=("$(cd "$VENV" && pwd)/bin/python") # the same path on every node
fi

# One task per node, which starts the ranks of the node and has all of its cores. The job continues
# without a task that ends.
flux run --nodes="$(flux getattr size)" --exclusive -o exit-timeout=none \
    "${python[@]}" -m hvdtrain.cli launch --slots {{ job.ranks }} -- "${arguments[@]}" &
launcher=$!

# Flux also sends these signals to the tasks: the ranks save and exit with 75.
trap 'interrupted=yes' USR1 USR2
trap 'interrupted=yes ended=yes; kill -TERM "$launcher" 2>/dev/null || true' TERM
ended=''
while :; do
    interrupted='' code=0
    wait "$launcher" || code=$? # a trap ends `wait`, not the launcher
    [ -n "$interrupted" ] || break
done
[ "$code" != -1 ] || code=75 # a signal came as the launcher ended: bash has lost its code
[ -z "$ended" ] && [ "$code" = 75 ] || exit "$code"
restarts=${HVDTRAIN_RESTARTS:-0}
by_hand="to continue, repeat your flux batch command with HVDTRAIN_RUN=$run in front of it"
# Flux keeps the options of flux batch, this script and its arguments in the job's jobspec.
submit_again() {
    flux --parent job info --original "$FLUX_ENCLOSING_ID" jobspec |
        "${python[@]}" -c '
import json, sys
job = json.load(sys.stdin)
job["attributes"]["system"]["environment"].update(word.split("=", 1) for word in sys.argv[1:])
json.dump(job, sys.stdout)
' "HVDTRAIN_RUN=$run" "HVDTRAIN_RESTARTS=$((restarts + 1))" |
        flux --parent job submit
}
if [ "$restarts" -ge "$MAX_RESTARTS" ]; then
    echo "{{ file }}: not submitted again after $restarts restarts (MAX_RESTARTS); $by_hand" >&2
elif submit_again; then
    echo "{{ file }}: submitted again; it resumes from its newest checkpoint"
else
    echo "{{ file }}: Flux refuses the job; $by_hand" >&2
fi
exit 75
