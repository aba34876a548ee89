#!/bin/sh
# A node of the Ray cluster in the foreground; it exits when Ray does, and the container's restart policy restarts it.
#
# usage: ray.sh head | worker
#
# RAY_CPUS                logical CPUs of a worker; none: all that it sees. The head has none: it runs drivers alone
# RAY_OBJECT_STORE_BYTES  shared memory for what travels between processes and nodes; /dev/shm must be larger
# RAY_HEAD                host:port of the head, for a worker
set -eu
store=${RAY_OBJECT_STORE_BYTES:-536870912}
case ${1:-} in
head)
    # Ray would choose the address of the default route. On a network that spans hosts that is the one of Docker's
    # gateway, which no other container reaches: what workers send to the head would never arrive.
    # On SIGTERM the trainers, which run here, save a checkpoint first.
    exec python -m gxpo_services.local.ray_start start --head --block --disable-usage-stats --port 6379 --num-cpus 0 --num-gpus 0 \
        --node-ip-address "$(hostname -i | cut -d' ' -f1)" --dashboard-host 0.0.0.0 --dashboard-port 8265 --object-store-memory "$store" --temp-dir /tmp/ray
    ;;
worker)
    head=${RAY_HEAD:-ray-head:6379}
    # It does not depend on the head in docker-compose.yml: it would be stopped first, with the learners of trainers that
    # have no checkpoint yet.
    until python -c "import socket; socket.create_connection(('${head%:*}', ${head##*:}), 5).close()" 2>/dev/null; do
        sleep 1
    done
    exec python -m gxpo_services.local.ray_start start --block --disable-usage-stats --address "$head" \
        --num-cpus "${RAY_CPUS:-$(nproc)}" --object-store-memory "$store"
    ;;
*)
    echo "usage: ray.sh head | worker" >&2
    exit 2
    ;;
esac
