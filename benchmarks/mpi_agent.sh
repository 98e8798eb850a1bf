#!/bin/sh
# What mpirun calls instead of ssh: mpi_agent.sh LABORATORY ADDRESS COMMAND...
host=$((${2##*.} - 1))
namespace=$1-$host
shift 2
exec ip netns exec "$namespace" unshare --uts sh -c \
    "echo host$host > /proc/sys/kernel/hostname && $*"
