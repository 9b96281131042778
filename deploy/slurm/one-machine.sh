#!/bin/sh
# Start a Slurm cluster of one machine, for trials: sh deploy/slurm/one-machine.sh [FOLDER]
#
# Run it as root, on Debian or Ubuntu, in a machine or a container that is yours:
#     apt-get install slurm-wlm munge && sh deploy/slurm/one-machine.sh
# Two nodes, trial1 and trial2, are this machine, so that `srun --nodes 2` has two; their names are
# added to /etc/hosts. FOLDER (default /tmp/aiops-slurm) gets the configuration, state and logs.
# To end it: kill $(cat FOLDER/*.pid).
set -eu

folder=${1:-/tmp/aiops-slurm}
mkdir -p "$folder/state" "$folder/spool-trial1" "$folder/spool-trial2"

if ! munge -n >/dev/null 2>&1; then
    [ -e /etc/munge/munge.key ] || mungekey --create
    mkdir -p /run/munge && chown munge: /run/munge
    su munge -s /bin/sh -c munged
fi

cat >"$folder/slurm.conf" <<CONF
ClusterName=trial
SlurmctldHost=$(hostname -s)
SlurmUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmdSpoolDir=$folder/spool-%n
StateSaveLocation=$folder/state
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
NodeName=trial1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=17001 CPUs=8 State=UNKNOWN
NodeName=trial2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=17002 CPUs=8 State=UNKNOWN
PartitionName=cheap Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF State=UP
CONF
grep -q trial1 /etc/hosts || echo "127.0.0.1 trial1 trial2" >>/etc/hosts
ln -sf "$folder/slurm.conf" /etc/slurm/slurm.conf

# More processors than the machine has: Slurm is asked to believe it.
echo "SlurmdParameters=config_overrides" >>"$folder/slurm.conf"

slurmctld
slurmd -N trial1
slurmd -N trial2
timeout 30 sh -c 'until sinfo --noheader --states idle | grep -q idle; do sleep 0.5; done'
sinfo
