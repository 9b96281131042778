#!/bin/sh
# Workers on the machines of a host file, and their server beside rank 0. mpirun does not tell where
# rank 0 is: it is on the first machine of the file.
#     sh deploy/mpi/hosts.sh HOSTFILE WORKERS PROGRAM [ARGUMENTS]
set -eu

hosts=$1 workers=$2
shift 2
MASTER_ADDR=$(awk '!/^#/ && NF { print $1; exit }' "$hosts")
AIOPS_TOKEN=${AIOPS_TOKEN:-$(od -A n -N 16 -t x1 /dev/urandom | tr -d ' ')}
export MASTER_ADDR AIOPS_TOKEN

traces=$(env | sed -n 's/^\(AIOPS_TRACE\|OTEL_[A-Z_]*\)=.*/-x \1/p')
# shellcheck disable=SC2086  # of these variables only the names
exec mpirun --hostfile "$hosts" -n "$workers" --map-by slot -x MASTER_ADDR -x AIOPS_TOKEN -x PATH \
    $traces aiops join "$@"
