#!/bin/sh
# PostgreSQL as the user gxpo: at the first start the cluster, its one role (the password from a file) and its database.
#
# From the network everybody needs the password. Inside of this container the system's user gxpo is the role gxpo, for
# pg_dump and psql.
set -eu
data=/var/lib/gxpo-postgres/15
password=/secrets/database/password

if [ ! -s "$data/PG_VERSION" ]; then
    # Created under a temporary name and renamed: an interrupted first start is repeated.
    rm -rf "$data.part"
    initdb --pgdata "$data.part" --username gxpo --pwfile "$password" --encoding UTF8 --locale C.UTF-8 \
        --data-checksums --auth-local peer --auth-host scram-sha-256 >/dev/null
    echo 'host all all samenet scram-sha-256' >>"$data.part/pg_hba.conf"
    echo 'CREATE DATABASE gxpo;' | postgres --single -D "$data.part" postgres >/dev/null
    mv "$data.part" "$data"
    echo "postgres: a new database was made"
fi
exec postgres -D "$data" -c listen_addresses='*' -c unix_socket_directories=/tmp \
    -c max_connections="${POSTGRES_MAX_CONNECTIONS:-200}" -c shared_buffers="${POSTGRES_SHARED_BUFFERS:-256MB}"
