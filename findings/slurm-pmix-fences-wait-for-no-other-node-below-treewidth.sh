#!/usr/bin/env bash
# Slurm 22.05.8 with PMIx 4.2.2: a fence without data does not wait for the other nodes of a step
# that has fewer nodes than TreeWidth (default 50).
#
# MPI_Init of Open MPI ends with such a fence, as a barrier. A rank that leaves it early sends a
# message to one that is still starting.
#
# Guess: PMIx_Fence over all ranks returns when the last of them has called it, so rank 0 waits 3 s
# for rank 1 on the other node, whatever the configuration.
# Behavior: it returns at once. reverse_tree_info gives each node neither parent nor children if
# TreeWidth is larger than the number of nodes, and the plugin's tree has only roots then. Rank 0
# waits if TreeWidth is not larger, or with SLURM_PMIX_FENCE=ring.
# Output seen on 2026-11-29, Debian 12, two nodes on one machine:
#   default: rank 0 waited 0 s
#   TreeWidth=2: rank 0 waited 3 s
#   SLURM_PMIX_FENCE=ring: rank 0 waited 3 s
# Needs root, for a mount namespace.
set -euo pipefail
if [ "${1:-}" != inside ]; then
    directory=$(mktemp -d)
    trap 'rm -rf "$directory"' EXIT
    mkdir "$directory/root"
    (
        cd "$directory"
        slurm=22.05.8-4+deb12u3
        apt-get download -qq {slurmd,slurmctld,slurm-client,slurm-wlm-basic-plugins}=$slurm \
            libpmix2=4.2.2-1+deb12u1 munge libmunge2 libhwloc15 libevent-core-2.1-7 \
            libevent-pthreads-2.1-7 libdbus-1-3 libjson-c5 liblua5.1-0 libltdl7 libnuma1 liblz4-1 \
            libyaml-0-2 libpam0g libreadline8
        for package in *.deb; do dpkg -x "$package" root; done
        cp -a root/lib/. root/usr/lib/
        for daemon in slurmd slurmctld slurmstepd; do # links of the packages' own scripts
            ln -sf "$daemon-wlm" "root/usr/sbin/$daemon"
        done
    )
    # The processes of all daemons end with the process namespace.
    timeout 300 unshare --mount --pid --fork --kill-child --mount-proc bash "$0" inside "$directory"
    exit
fi
directory=$2
mount -t overlay overlay -o "lowerdir=$directory/root/usr:/usr" /usr
mount -t tmpfs tmpfs /run
export SLURM_CONF=$directory/slurm.conf
cat > "$directory/rank.py" <<'END'
import ctypes, time
pmix = ctypes.CDLL("libpmix.so.2")
process = ctypes.create_string_buffer(256 + 4)  # pmix_proc_t: name space and rank
assert pmix.PMIx_Init(process, None, 0) == 0
rank = int.from_bytes(process.raw[256:], "little")
assert pmix.PMIx_Fence(None, 0, None, 0) == 0
if rank == 1:
    time.sleep(3)
began = time.monotonic()
assert pmix.PMIx_Fence(None, 0, None, 0) == 0
if rank == 0:
    print(f"rank 0 waited {time.monotonic() - began:.0f} s")
pmix.PMIx_Finalize(None, 0)
END
head -c 1024 /dev/urandom > "$directory/key"
chmod 400 "$directory/key"
mkdir -p /run/munge "$directory"/{state,one/tmp,two/tmp}
munged --force --key-file="$directory/key" --socket=/run/munge/munge.socket.2 \
    --log-file="$directory/munge.log" --seed-file="$directory/seed" --pid-file=/run/munged.pid
measure() { # name, configuration
    cat > "$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=$(hostname -s)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
StateSaveLocation=$directory/state
SlurmdSpoolDir=$directory/%n
TmpFS=$directory/%n/tmp
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
NodeName=one NodeHostname=$(hostname -s) Port=17001 CPUs=2
NodeName=two NodeHostname=$(hostname -s) Port=17002 CPUs=2
PartitionName=all Nodes=ALL Default=YES
$2
END
    slurmctld -D > "$directory/slurmctld.log" 2>&1 &
    local daemons=$!
    for node in one two; do
        slurmd -D -N "$node" > "$directory/$node.log" 2>&1 &
        daemons="$daemons $!"
    done
    for _ in $(seq 60); do
        [ "$(sinfo --noheader --states=idle --format=%D 2> /dev/null)" != 2 ] || break
        sleep 1
    done
    waited=$(
        timeout 60 srun --mpi=pmix --nodes=2 --ntasks=2 "${PYTHON:-python3}" "$directory/rank.py"
    )
    echo "$1: $waited"
    kill $daemons
    wait $daemons || true
}
measure default ""
[ "$waited" = "rank 0 waited 0 s" ]
measure TreeWidth=2 TreeWidth=2
[ "$waited" = "rank 0 waited 3 s" ]
export SLURM_PMIX_FENCE=ring
measure SLURM_PMIX_FENCE=ring ""
[ "$waited" = "rank 0 waited 3 s" ]
